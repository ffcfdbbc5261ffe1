"""Attention on a cuboid. A rank has full sequences of a block of heads, so attention is local, with two exceptions:

    few key heads    If y·z cannot split the key heads, their linear gives keys and values split by tokens. They are
                     gathered over y and z, and each rank picks the heads that its queries need.
    long sequences   If x splits the sequence too, keys and values are gathered over the ranks that share it. Each rank
                     has a piece from either end, which balances causal work.

Saved: queries, keys and values as attention uses them, its output, and a number per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.flight import Pause, Steps
from cuboid.fuse import Fuse, plain
from cuboid.layers.attention import Cache, attend, attend_both_ways, attend_cached, rotate
from cuboid.mesh.layout import ceil_div
from cuboid.step.op import Layer, Local, OnItems, chain, collective, recomputed
from cuboid.step.weights import Gathered

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False)
class Attend:
    """(q, k, v) [s, b, (h e)] -> [s, b, (h e)]. With few key heads, k and v are [s/z, b, …]. `heads` and `kv_heads` are
    global counts; `norms` are the weights of QK-norm."""

    heads: int
    kv_heads: int
    head_dim: int
    y: Axis
    z: Axis
    norms: Sequence[nn.Parameter] = ()
    eps: float = 0.0
    causal: bool = True
    fuse: Fuse = plain

    takes, gives = "heads", "attended"

    def __post_init__(self) -> None:
        few = self.kv_heads % (self.y.size * self.z.size) != 0
        self._before: list[Layer] = [OnItems(1, 2, chain(*self._pick()))] if few else []
        if self.norms:
            self._before.append(OnItems(0, 1, recomputed(Local(self._normalised, *self.norms))))
        self._local = chain(*self._before, Local(self._attend, placed=True))

    def __call__(self, qkv: QKV, w: Gathered, at: Any) -> Steps:
        (s, b, width), axis = qkv[0].shape, at.place.context
        layer = self._local if axis.size == 1 else self._over(axis, width)
        steps = layer(qkv, w, at)
        del qkv
        yield Pause(work=4 * s * s * axis.size * b * width)
        return (yield from steps)

    def _by_head(self, *each: Tensor) -> tuple[Tensor, ...]:
        """[s, b, (h e)] -> [s, b, h, e]; leaves x that already has heads"""
        return tuple(x.unflatten(-1, (-1, self.head_dim)) if x.dim() == 3 else x for x in each)

    def _normalised(self, q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.rms_norm(x, w.shape, w, self.eps) for x, w in zip(self._by_head(q, k), weights, strict=True))

    def _rotated(self, at: Any, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        q, k, v = self._by_head(q, k, v)
        rotation = at.place.rotation(q.dtype)
        if rotation is None:
            return q, k, v
        v = v if self.norms else v.contiguous()  # a view would keep q and k alive
        return self.fuse(rotate)(q, *rotation), self.fuse(rotate)(k, *rotation), v

    def _attend(self, at: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = self._rotated(at, q, k, v)
        if at.caches is not None:
            return attend_cached(q, k, v, at.caches.setdefault(self, Cache()), at.place.seq)
        return attend(q, k, v) if self.causal else attend_both_ways(q, k, v, at.place.seq)

    # Sequences split over x

    def _over(self, context: Axis, width: int) -> Layer:
        gathered = chain(
            Local(lambda k, v: torch.cat((k, v), 2)),
            collective("all_gather", context, 2 * width),
            Local(partial(in_order, context.size)),
        )
        return chain(
            *self._before, Local(self._rotated, placed=True), OnItems(1, 2, gathered), Local(self._pieces, placed=True)
        )

    def _pieces(self, at: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the two pieces of this rank's queries."""
        context = at.place.context
        if not self.causal:
            return attend_both_ways(q, k, v, at.place.seq)
        piece = len(q) // 2
        stops = (context.index + 1) * piece, (2 * context.size - context.index) * piece  # later keys are masked
        pieces = zip(q.contiguous().chunk(2), stops, strict=True)
        return torch.cat([attend(q_i, k[:stop], v[:stop]) for q_i, stop in pieces])

    # Few key heads

    def _pick(self) -> list[Layer]:
        """(k, v) split by tokens over z and by features over y -> the key heads that this rank's queries need."""
        y, z, kv_dim, layers, first = self.y, self.z, self.kv_heads * self.head_dim, list[Layer](), 0
        width = ceil_div(kv_dim, y.size)
        if self.kv_heads % y.size:
            layers += [Local(partial(padded, width)), collective("all_gather", y, 2 * kv_dim / z.size)]
            layers.append(Local(partial(features_joined, kv_dim)))
            width = kv_dim
        else:
            first = y.index * self.kv_heads // y.size
        mine = self.heads // (y.size * z.size)
        top = (y.index * z.size + z.index) * mine
        need = [h * self.kv_heads // self.heads - first for h in range(top, top + mine)]
        each = sorted(set(need))
        if [head for head in each for _ in range(mine // len(each))] == need:
            need = each  # every key head serves the same number of this rank's queries
        layers += [Local(lambda k, v: torch.cat((k, v), -1)), collective("all_gather", z, 2 * width)]
        return [*layers, Local(partial(picked, need, self.head_dim))]


def in_order(ranks: int, kv: Tensor) -> tuple[Tensor, ...]:
    """Put the pieces of all ranks into sequence order -> (k, v)."""
    pieces = kv.chunk(2 * ranks)
    return torch.cat((*pieces[::2], *pieces[::-2])).chunk(2, 2)


def padded(width: int, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([F.pad(x, (0, width - x.shape[-1])) for x in (k, v)])[None]


def features_joined(kv_dim: int, kv: Tensor) -> tuple[Tensor, ...]:
    return kv.permute(1, 2, 3, 0, 4).flatten(-2)[..., :kv_dim].unbind()  # y 2 s b w -> 2 s b (y w)


def picked(need: Sequence[int], e: int, kv: Tensor) -> tuple[Tensor, ...]:
    by_head = (x.unflatten(-1, (-1, e)) for x in kv.chunk(2, -1))
    return tuple(torch.stack([x[:, :, head] for head in need], 2) for x in by_head)
