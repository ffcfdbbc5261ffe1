"""Silent corruption: a bit that flips in memory, a unit that multiplies wrongly. Found by doing things twice.

Copies: what several ranks hold (norms and biases; with a data axis everything, the optimizer's moments included) must
agree bit for bit. Each rank adds up the bits of each such tensor as integers, and the sums of all ranks are compared.

Products: each rank multiplies a weight's shard, the weights taking turns, with numbers made from the step; and so do
the next two ranks, to which the shard is sent. All three must agree bit for bit. Matrix products are nearly all of the
work, and the numbers are new each time.

With three copies or more the rank in the minority is named, with two both are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product as pairs

import torch
from torch import Tensor

from cuboid.comm.collectives import all_gather, shift
from cuboid.comm.journal import listed
from cuboid.layers.product import multiply
from cuboid.layers.randomness import key_of, normal
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, shard_of
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer
from cuboid.run.watch import RankError
from cuboid.train.checkpoint import MOMENTS

ROWS = 64  # of a product that is done again
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corrupted(RankError):
    """Values that must be equal are not; the message names the ranks."""


@torch.no_grad()
def check(model: Transformer, optimizer: torch.optim.Optimizer, step: int, every: int) -> None:
    """Raise, on all ranks, if copies or products disagree. The last check was `every` steps ago."""
    found = [*differing_copies(model, optimizer), *differing_products(model, step // every)]
    if found:
        since = max(step - every, 0)
        raise Corrupted(
            f"step {step}: " + "\n  ".join(found) + f"\n  Take that machine out and resume from a checkpoint of step "
            f"{since} or before: later ones may hold what is wrong"
        )


def checksum(x: Tensor) -> Tensor:
    """The sum of its bits as integers: one flipped bit changes it."""
    return x.contiguous().view(BITS[x.element_size()]).sum(dtype=torch.int64)


def differing_copies(model: Transformer, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    mesh = model.parallel.mesh
    held: list[tuple[str, Tensor, Spec]] = []
    for name, parameter, d in declared(model):
        if d.spec.copies(mesh.cuboid) > 1:
            moments = ((f"{moment} of {name}", optimizer.state[parameter][moment]) for moment in MOMENTS)
            held += [(each, shard_of(x), d.spec) for each, x in ((name, parameter), *moments)]
    if not held:
        return
    sums = all_gather(torch.stack([checksum(x) for _, x, _ in held])[None], mesh.world).wait().cpu()
    for i, (name, _, spec) in enumerate(held):
        holders = torch.from_numpy(mesh.cuboid.array((*spec.cut_by, *spec.replicated)))
        holders = holders.reshape(-1, spec.copies(mesh.cuboid))
        copies = sums[:, i][holders]
        for line in (copies != copies[:, :1]).any(1).nonzero().flatten().tolist():
            yield blame(f"copies of {name}", dict(zip(holders[line].tolist(), copies[line].tolist(), strict=True)))


def differing_products(model: Transformer, turn: int) -> Iterator[str]:
    mesh = model.parallel.mesh
    world, times = mesh.world, min(3, mesh.world.size)
    weights = [(name, shard_of(p), d.spec) for name, p, d in declared(model) if p.dim() == 2]
    name, weight, spec = weights[turn % len(weights)]
    n, k = least(spec, mesh.cuboid)
    if times == 1 or not n * k:
        return
    shard = weight[:n, :k].to(model.parallel.dtype or weight.dtype)
    X = normal(key_of(turn, name), (ROWS, k), ((0, ROWS), (0, k)), 1.0).to(shard)
    mine = torch.stack([product_of(X, shift(shard, world, by).wait()) for by in range(times)])
    sums = all_gather(mine[None], world).wait().tolist()
    for rank in range(world.size):
        found = {(rank + by) % world.size: sums[(rank + by) % world.size][by] for by in range(times)}
        if len(set(found.values())) > 1:
            yield blame(f"products with rank {rank}'s {name}", found)


def least(spec: Spec, cuboid: Cuboid) -> tuple[int, ...]:
    """What every rank's shard has at least, in each dim: cuts may be uneven."""
    places = [dict(zip(cuboid.sizes, at, strict=True)) for at in pairs(*(range(n) for n in cuboid.sizes.values()))]
    return tuple(min(sizes) for sizes in zip(*(spec.local_shape(cuboid, at) for at in places), strict=True))


def product_of(X: Tensor, W: Tensor) -> Tensor:
    Y = X.new_empty(1, X.shape[0], W.shape[0])
    multiply(X[None], W, Y)
    return checksum(Y)


def blame(what: str, sums: Mapping[int, int]) -> str:
    """Who is in the minority, if there is one."""
    ((value, most),) = Counter(sums.values()).most_common(1)
    if 2 * most <= len(sums):
        return f"{what} differ between {listed(sums)}"
    wrong = [rank for rank, each in sums.items() if each != value]
    return f"{listed(wrong)} differ{'s' * (len(wrong) == 1)} in {what} from {listed(sums.keys() - set(wrong))}"
