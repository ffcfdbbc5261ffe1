"""Checks for silent corruption: a bit that flips in memory, a unit that multiplies wrongly.

Replicated tensors (norms and biases; with several replicas all tensors, the optimizer's moments too) must be the same
on all ranks that hold them, bit for bit. Each rank adds up the bits of each as integers; the sums are compared.

Matmuls, nearly all of the work, are repeated: each rank multiplies a weight's shard, another weight in each check, with
new random numbers. The next two ranks get the shard and do the same. All three must agree bit for bit.

If three or more ranks are compared, the one in the minority is named; of two, both are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

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
from cuboid.run.errors import RankError
from cuboid.train.checkpoint import MOMENTS

ROWS = 64  # of a repeated matmul
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corrupted(RankError):
    """Values that must be equal differ; the message names the ranks."""


@torch.no_grad()
def check(model: Transformer, optimizer: torch.optim.Optimizer, step: int, every: int) -> None:
    """Raise Corrupted, on all ranks, if tensors or matmuls disagree. The last check was `every` steps ago."""
    found = [*differing_copies(model, optimizer), *differing_matmuls(model, step // every)]
    if found:
        since = max(step - every, 0)
        raise Corrupted(
            f"step {step}: " + "\n  ".join(found) + f"\n  Remove that machine and resume from a checkpoint of step "
            f"{since} or before: later ones may be corrupt"
        )


def checksum(x: Tensor) -> Tensor:
    """Sums the bits as integers: one flipped bit changes the sum."""
    return x.contiguous().view(BITS[x.element_size()]).sum(dtype=torch.int64)


def differing_copies(model: Transformer, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    mesh = model.parallel.mesh
    mine = {name: parameter for name, parameter, _ in declared(model)}
    held, checksums = list[tuple[str, Spec]](), list[Tensor]()
    for name, spec in model.specs().items():
        if spec.copies(mesh.cuboid) > 1:
            held += [(name, spec), *((f"{moment} of {name}", spec) for moment in MOMENTS)]
            state = optimizer.state.get(mine[name], {}) if name in mine else {}  # none of a frozen one
            tensors = [mine.get(name), *(state.get(moment) for moment in MOMENTS)]
            checksums += [checksum(torch.empty(0, device=mesh.device) if x is None else shard_of(x)) for x in tensors]
    if not held:
        return
    sums = all_gather(torch.stack(checksums)[None], mesh.world).wait().cpu()
    for i, (name, spec) in enumerate(held):
        holders = torch.from_numpy(spec.holders(mesh.cuboid))
        copies = sums[:, i][holders]
        for line in (copies != copies[:, :1]).any(1).nonzero().flatten().tolist():
            yield blame(f"copies of {name}", dict(zip(holders[line].tolist(), copies[line].tolist(), strict=True)))


def differing_matmuls(model: Transformer, turn: int) -> Iterator[str]:
    mesh = model.parallel.mesh
    world, times = mesh.world, min(3, mesh.world.size)
    of = model if mesh.pipe.size == 1 else next(iter(model.blocks))  # every stage has blocks
    weights = [(name, shard_of(p), d.spec) for name, p, d in declared(of) if p.dim() == 2]
    name, weight, spec = weights[turn % len(weights)]
    n, k = least(spec, mesh.cuboid)
    if times == 1 or not n * k:
        return
    shard = weight[:n, :k].to(model.parallel.dtype or weight.dtype)
    X = normal(key_of(turn, name), (ROWS, k), ((0, ROWS), (0, k)), 1.0).to(shard)
    mine = torch.stack([matmul_checksum(X, shift(shard, world, by).wait()) for by in range(times)])
    sums = all_gather(mine[None], world).wait().tolist()
    for rank in range(world.size):
        found = {(rank + by) % world.size: sums[(rank + by) % world.size][by] for by in range(times)}
        if len(set(found.values())) > 1:
            yield blame(f"matmuls with rank {rank}'s {name}", found)


def least(spec: Spec, cuboid: Cuboid) -> tuple[int, ...]:
    """The smallest size of any shard in each dim: splits may be uneven."""
    places = [cuboid.coordinates(rank) for rank in spec.holders(cuboid).flatten().tolist()]
    return tuple(min(sizes) for sizes in zip(*(spec.local_shape(cuboid, at) for at in places), strict=True))


def matmul_checksum(X: Tensor, W: Tensor) -> Tensor:
    Y = X.new_empty(1, X.shape[0], W.shape[0])
    multiply(X[None], W, Y)
    return checksum(Y)


def blame(what: str, sums: Mapping[int, int]) -> str:
    """Names the ranks in the minority or, if there is none, all."""
    ((value, most),) = Counter(sums.values()).most_common(1)
    if 2 * most <= len(sums):
        return f"{what} differ between {listed(sums)}"
    wrong = [rank for rank, each in sums.items() if each != value]
    return f"{listed(wrong)} differ{'s' * (len(wrong) == 1)} in {what} from {listed(sums.keys() - set(wrong))}"
