"""3-D parallel: the product of product.py on any x × y × z block.

    tensor                held by a rank
    residual stream       [s/y, b/x, d/z]
    attention             [s,   b/x, heads/(y z)]      whole sequences of a block of heads
    MLP inner             [s/z, b/x, ffn/y]
    logits                [s/z, b/x, V/y]
    into weight [n, k]    [n/(y x), k/z]               roles n = y, k = z
    out_of weight [n, k]  [n/(z x), k/y]               roles n = z, k = y
    tables [V, d]         [V/(y x), d/z]               like an into weight

Axis x plays m. When it is longer than the batch it cuts the sequence too: gcd(b, x) ranks cut the batch, the rest the
sequence, dealt from both ends so that causal attention is even, with keys and values gathered over them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import collective
from cuboid.comm.flight import Steps
from cuboid.layers.attention import attend, attend_both_ways, attend_cached, rotate
from cuboid.layers.embedding import Lookup, lookup
from cuboid.layers.head import Head, Launched, chunk_rows, head_loss, to_head
from cuboid.layers.loss import Loss
from cuboid.layers.norm import Norm, RMSNorm, norm
from cuboid.layers.product import Linear, Out, Product, product
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, ceil_div, cut, round_up
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index, Place
from cuboid.model.bucketed import Bucketed
from cuboid.model.config import ModelConfig
from cuboid.model.parallel import CAUSAL, Attend, Role
from cuboid.model.rotary import rotation
from cuboid.step.schedule import PREFETCH, Schedule
from cuboid.step.weights import Bucket, Weights

SPECS: dict[Role, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "into.weight": ((("y", "x"), ("z",)), ()),
    "into.bias": ((("y", "x"),), ()),  # whole dY over z: every z-rank has the same gradient
    "out_of.weight": ((("z", "x"), ("y",)), ()),
    "out_of.bias": ((("z", "x"),), ()),
    "norm": ((("z", "x"),), ("y",)),  # each y-rank has seen its own tokens
    "head_norm": (((),), ("x", "y", "z")),  # each rank has seen its own tokens and heads
    "table": ((("y", "x"), ("z",)), ()),
}


#: What products are computed in, by its name; None: as weights are stored.
COMPUTE: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Of a part of the residual stream. Below it a collective is mostly latency, and more of them cost more than they hide.
LEAST_PART = 1 << 17

#: Tokens that a product of one of four parts has: with fewer, products take longer than what they hide.
LEAST_ROWS = 512


@dataclass(frozen=True)
class Policy:
    """What is kept from forward for backward of an operand gathered for a product: its shard, to gather again, or the
    whole."""

    activations: Literal["regather", "retain"] = "regather"
    weights: Literal["regather", "retain"] = "regather"
    head_elements: int = 1 << 24  # of partial logits at a time

    def __post_init__(self) -> None:
        for name in ("activations", "weights"):
            if getattr(self, name) not in ("regather", "retain"):
                raise ValueError(f"policy {name}={getattr(self, name)!r} is not one of regather, retain")


class CuboidParallel(Bucketed):
    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        policy: Policy = Policy(),
        dtype: torch.dtype | None = None,
        schedule: Schedule = PREFETCH,
    ) -> None:
        self.config, self.mesh, self.policy, self.dtype, self.schedule = config, mesh, policy, dtype, schedule
        self._in_flight: deque[Bucket] = deque()
        config.check(mesh.cuboid, mesh.cuboid.data, 1)

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        cuts, sums = SPECS[role]
        return Spec(shape, cuts, sums)

    # Tokens

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        mesh, device = self.mesh, self.mesh.device
        replicas, x, y, z = mesh.data.size, mesh.x.size, mesh.y, mesh.z
        padded = round_up(batch, replicas * x) if decode else batch
        self.config.check(mesh.cuboid, padded, start + seq)
        along_batch = gcd(padded // replicas, x)
        context = mesh.part_of_x(x // along_batch)
        count = padded // (replicas * along_batch)
        first = (mesh.data.index * along_batch + mesh.x.index // context.size) * count
        samples = torch.arange(first, first + count, device=device)
        unit = lcm(y.size, z.size, 2 if context.size > 1 else 1) * context.size
        positions = start + torch.cat(dealt(round_up(seq, unit), context.size, context.index)).to(device)
        s_y = positions.chunk(y.size)[y.index]
        s_z = positions.chunk(z.size)[z.index]
        hidden = torch.arange(*cut(self.config.hidden, z.size, z.index), device=device)
        classes = torch.arange(*cut(self.config.vocab, y.size, y.index), device=device)
        residual, logits = Index(s_y, samples, hidden), Index(s_z, samples, classes)
        turn = rotation(self.config, positions) if self.config.rotary else None
        return Place(batch, seq, start, samples, positions, context, residual, logits, turn)

    def bucket(self, parameters: Sequence[tuple[nn.Parameter, Spec]], before: Bucket | None = None) -> Bucket:
        return Bucket(parameters, self.mesh, self.dtype, self.policy.weights == "retain", self._in_flight, before)

    # Layers

    def embed(self, ids: Tensor, tables: Sequence[tuple[Weights, nn.Parameter]], place: Place) -> Steps:
        lengths = (self.config.vocab, self.config.context)
        starts = [cut(n, self.mesh.y.size, self.mesh.y.index)[0] for n, _ in zip(lengths, tables, strict=False)]
        all_ids = (ids, place.positions[:, None])[: len(tables)]
        X = yield from lookup(tables, Lookup(all_ids, starts, self.mesh.y))
        return X

    def norm(self, X: Tensor, W: Weights, weight: nn.Parameter, bias: nn.Parameter | None) -> Steps:
        eps, fuse = self.config.norm_eps, self.schedule.fuse
        call = Norm(W.bucket, weight, bias, self.mesh.z, eps, centred=bias is not None, fuse=fuse)
        Y = yield from norm(X, W, call)
        return Y

    def _product(
        self, X: Tensor, W: Weights, outs: Sequence[Out], k: Axis, n: Axis, heads: bool = False, whole: bool = False
    ) -> Steps:
        """In chunks, unless as a `whole`."""
        retain, s = self.policy.activations == "retain", X.shape[0] * (1 if heads else n.size)
        chunks = chunk_count(s, k.size, n.size, 1 if whole else self.schedule.chunks)
        Ys = yield from product(X, W, Product(W.bucket, outs, k, n, heads, retain, chunks))
        return Ys

    def into(self, X: Tensor, W: Weights, linears: Sequence[Linear], heads: Sequence[int] = ()) -> Steps:
        y, z = self.mesh.y, self.mesh.z
        # outputs whose heads y·z cannot cut come out cut by tokens; `attend` gathers them
        whole = [bool(heads) and heads[i] % (y.size * z.size) == 0 for i in range(len(linears))]
        outs = [
            Out(chosen, by_heads)
            for by_heads in (True, False)
            if (chosen := [linear for linear, by in zip(linears, whole, strict=True) if by == by_heads])
        ]
        Ys = yield from self._product(X, W, outs, k=z, n=y, whole=bool(heads) and not all(whole))
        found: dict[int, Tensor] = {}
        for Y, out in zip(Ys, outs, strict=True):
            rows = [W[linear.weight].shape[0] // (z.size if out.heads else 1) for linear in out.linears]
            parts = Y.split(rows, dim=-1) if len(rows) > 1 else (Y,)
            found.update(zip(map(id, out.linears), parts, strict=True))
        Ys = [found[id(linear)] for linear in linears]
        return [Y.unflatten(-1, (-1, self.config.head_dim)) if by else Y for Y, by in zip(Ys, whole, strict=True)]

    def out_of(self, X: Tensor, W: Weights, linear: Linear, heads: int = 0) -> Steps:
        y, z = self.mesh.y, self.mesh.z
        (Y,) = yield from self._product(X, W, [Out([linear])], k=y, n=z, heads=bool(heads))
        return Y

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place, how: Attend = CAUSAL) -> Steps:
        if k.dim() == 3:  # cut by tokens
            k, v = yield from self._few_heads(k, v)
        if how.norms is not None:
            q, k = (RMSNorm.apply(x, w, self.config.norm_eps) for x, w in zip((q, k), how.norms, strict=True))
        elif place.turn is not None:
            v = v.contiguous()  # else the view would keep q's and k's memory as well
        if place.turn is not None:
            q, k = (rotate(each, place.turn, self.schedule.fuse) for each in (q, k))
        if how.cache is not None:
            return attend_cached(q, k, v, how.cache, place.seq)
        if place.context.size > 1:
            k, v = yield from self._whole_sequence(k, v, place.context)
        if not how.causal:
            return attend_both_ways(q, k, v, place.seq)
        if place.context.size == 1:
            return attend(q, k, v)
        parts, index = place.context.size, place.context.index
        piece = len(q) // 2
        stops = (
            (index + 1) * piece,
            (2 * parts - index) * piece,
        )  # our two pieces' ends: nothing later is looked at
        q = q.contiguous()  # as with v above
        return torch.cat([attend(q_i, k[:stop], v[:stop]) for q_i, stop in zip(q.chunk(2), stops, strict=True)])

    def _few_heads(self, k: Tensor, v: Tensor) -> Steps:
        """Keys and values of fewer heads than y·z, cut by tokens over z and by features over y: gather them and pick
        the heads that this rank's queries need."""
        y, z, config = self.mesh.y, self.mesh.z, self.config
        first = 0
        if config.kv_heads % y.size:
            width = ceil_div(config.kv_dim, y.size)
            kv = torch.stack([F.pad(part, (0, width - part.shape[-1])) for part in (k, v)])
            kv = yield from collective("all_gather", kv[None], y)
            k, v = kv.permute(1, 2, 3, 0, 4).flatten(-2)[..., : config.kv_dim].unbind()  # y 2 s b w -> 2 s b (y w)
        else:
            first = y.index * config.kv_heads // y.size
        kv = yield from collective("all_gather", torch.cat((k, v), -1), z)
        k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in kv.chunk(2, -1))
        mine = config.heads // (y.size * z.size)
        top = (y.index * z.size + z.index) * mine
        need = [h * config.kv_heads // config.heads - first for h in range(top, top + mine)]
        each = sorted(set(need))
        if [head for head in each for _ in range(mine // len(each))] == need:
            need = each  # every key head serves as many of our queries
        k, v = (torch.stack([part[:, :, head] for head in need], 2) for part in (k, v))
        return k, v

    def _whole_sequence(self, k: Tensor, v: Tensor, context: Axis) -> Steps:
        """Keys and values of all parts of the sequence, in its order."""
        kv = yield from collective("all_gather", torch.cat((k, v), 2), context)
        pieces = kv.chunk(2 * context.size)
        return torch.cat((*pieces[::2], *pieces[::-2])).chunk(2, 2)

    def logits(self, X: Tensor, W: Weights, weight: nn.Parameter) -> Steps:
        outs = [Out([Linear(weight, None)])]
        (Y,) = yield from self._product(X, W, outs, k=self.mesh.z, n=self.mesh.y, whole=True)
        return Y

    def to_head(self, X: Tensor) -> Launched:
        return to_head(X, self.mesh.y)

    def head_loss(
        self, parts: Sequence[Launched], W: Weights, weight: nn.Parameter, targets: Tensor, loss: Loss
    ) -> Steps:
        mesh, vocab, (s, b) = self.mesh, self.config.vocab, targets.shape
        start, _ = cut(vocab, mesh.y.size, mesh.y.index)
        row = b // len(parts) * ceil_div(vocab, mesh.y.size)
        chunk = chunk_rows(s, mesh.z.size, row, self.policy.head_elements)
        tokens, rows = zip(*parts, strict=True)
        call = Head(W.bucket, weight, rows, targets, start, vocab, loss, mesh, chunk, torch.is_grad_enabled())
        return head_loss(W, call, tokens)
        yield


def suitable_schedule(
    config: ModelConfig, cuboid: Cuboid, batch: int, seq: int, itemsize: int, apart: bool = True
) -> Schedule:
    """Where activations move and are large enough for it to pay: two parts of a batch, or chunks. Four where they
    move over z, which scatters and gathers the MLP's widest rows with next to nothing to compute between, and there
    are tokens enough. Where messages are made by the processors that compute (not `apart`) nothing can be hidden, and
    parts only cost."""
    samples = batch // cuboid.data // gcd(batch // cuboid.data, cuboid.x)
    most = batch * seq * config.hidden * itemsize // cuboid.ranks // LEAST_PART
    if cuboid.y * cuboid.z == 1 or most < 2 or not apart:
        return PREFETCH
    four = cuboid.z > 1 and batch * seq // (cuboid.data * cuboid.x) >= 4 * LEAST_ROWS
    wanted = (4, 2) if four else (2,)
    parts = next((n for n in wanted if n <= most and samples % n == 0), 1)
    return Schedule(parts=parts) if parts > 1 else Schedule(chunks=min(4, most))


def chunk_count(s: int, y: int, z: int, wanted: int) -> int:
    """Into how many equal chunks of whole rows a sequence of s can be taken, cut by y as by z: at most `wanted`.

    >>> chunk_count(48, 2, 3, 4), chunk_count(36, 2, 3, 4)
    (4, 3)
    """
    rows = s // lcm(y, z)
    return next(n for n in range(min(wanted, rows), 0, -1) if rows % n == 0)


def dealt(s: int, parts: int, index: int) -> tuple[Tensor, ...]:
    """The positions that part `index` of a sequence of s takes: its share, from both ends if there are several parts.

    >>> [[int(i) for p in dealt(8, 2, index) for i in p] for index in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if parts == 1:
        return (torch.arange(s),)
    pieces = torch.arange(s).chunk(2 * parts)
    return pieces[index], pieces[-1 - index]
