"""The head and the loss in one: logits live a chunk of the sequence at a time, and never whole over the vocabulary.

The head is an *into* product (n = y splits the vocabulary, k = z the features). For each chunk of rows, with (1)–(3):

    logits = RS_z( X W_yᵀ )  [s/z, b, V/y]  ->  loss, dlogits  ->  dX = AG_z(dlogits) W_y,  dW_y += AG_z(dlogits)ᵀ X

and dX is reduce-scattered over y, dW over x, once. Gradients are computed in forward, those of the sum of losses, and
multiplied in backward by dloss / (losses that count): the largest tensors of the step, partial logits and dlogits, are
never saved, and the losses that count need not be known before they are. Saved: the shards of dX and dW.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm.collectives import COLLECTIVES, TRANSPOSE, Kind, all_gather, reduce_scatter
from cuboid.comm.flight import Pause, Steps
from cuboid.fuse import Fuse, plain
from cuboid.layers.loss import Loss
from cuboid.layers.product import mm
from cuboid.mesh.layout import ceil_div, shard_range
from cuboid.mesh.mesh import Mesh
from cuboid.step.op import Ahead, Back, scaled
from cuboid.step.weights import Gathered


@dataclass(eq=False)
class HeadLoss:
    """X [s/y, b, d/z] -> [sum of losses, how many count] of this rank's rows, in fp32 or better. At most `elements` of
    partial logits live at a time. Where `kind` is copy, X is whole: [s, b, d/z]."""

    weight: nn.Parameter
    vocab: int
    mesh: Mesh
    elements: int
    kind: Kind = "all_gather"
    fuse: Fuse = plain

    takes, gives = "residual", "loss"
    early = True  # gradients are computed in forward
    spares_dX = True  # if the head is a stage by itself and the lowest that is trained

    def __call__(self, X_s: Tensor, w: Gathered, at: Any) -> Steps:
        mesh, (s, b) = self.mesh, at.targets.shape
        flight, sent, width = COLLECTIVES[self.kind](X_s, mesh.y), X_s.nbytes * (mesh.y.size - 1), X_s.shape[-1]
        del X_s
        yield Pause(sent, 6 * s * b * width * self.vocab / mesh.y.size)
        X, train = flight.wait(), at.train and self.weight.requires_grad
        sums = torch.zeros(2, dtype=torch.promote_types(X.dtype, torch.float32), device=X.device)
        dW = None
        if train:
            dW, found = w.gradient([self.weight], wide=True)
            dW = dW if found else dW.zero_()
        dX = self._rows(X, w, at, sums, dW)
        del flight, X, dW, w
        if dX is not None:
            flight = COLLECTIVES[TRANSPOSE[self.kind]](dX, mesh.y)
            del dX
            yield Pause(sent)
            dX = flight.wait()
            del flight
        saved = [dX]
        del dX

        def run(scale: Tensor, w: Gathered, before: Ahead) -> Steps:
            before()
            dX = saved.pop()
            return None if dX is None else self.fuse(scaled)(dX, scale)
            yield

        return sums, Back(run) if at.train else None

    def _rows(self, X: Tensor, w: Gathered, at: Any, sums: Tensor, dW: Tensor | None) -> Tensor | None:
        """dX [s, b, d/z], if it is needed; losses and dW are added to `sums` and `dW`."""
        mesh, fuse, W, loss, (s, b) = self.mesh, self.fuse, w[self.weight], at.loss or Loss(), at.targets.shape
        start, _ = shard_range(self.vocab, mesh.y.size, mesh.y.index)
        chunk = chunk_rows(s, mesh.z.size, b * ceil_div(self.vocab, mesh.y.size), self.elements)
        dX = torch.empty_like(X) if at.train and at.needs_dX else None
        w.shrunk = shrinkage(X.dtype, s * b)
        for top in range(0, s, chunk):
            rows = slice(top, top + chunk)
            X_m = X[rows].flatten(0, 1)
            mine = at.targets[rows].chunk(mesh.z.size)[mesh.z.index].flatten()
            logits = reduce_scatter(X_m @ W.T, mesh.z, dtype=sums.dtype).wait()  # (1)
            parts = all_gather(fuse(loss.parts)(logits, mine, start)[None], mesh.y).wait()
            total, counted, lse = fuse(loss.merge)(parts, mine, self.vocab)
            sums += torch.stack((total, counted.to(sums.dtype)))
            if at.train:
                dlogits = fuse(loss.gradient)(logits, mine, start, lse, self.vocab, X.dtype)
                dlogits = all_gather(dlogits, mesh.z).wait()
                if dX is not None:
                    mm(dlogits, W, dX[rows].flatten(0, 1), add=False)  # (2)
                if dW is not None:
                    mm(dlogits.T, X_m if w.shrunk == 1 else X_m * w.shrunk, dW, add=True)  # (3)
        return dX


def shrinkage(dtype: torch.dtype, rows: int) -> float:
    """What X is multiplied by, so that in fp16 a sum over so many rows, of terms of up to 128, does not overflow."""
    return 2.0 ** -max(0, rows.bit_length() - 9) if dtype == torch.float16 else 1.0


def chunk_rows(s: int, z: int, row: int, limit: int) -> int:
    """How much of the sequence to take at a time: a multiple of z that divides s, of at most `limit` elements of the
    partial logits if possible; a row of the sequence has `row` of them.

    >>> chunk_rows(24, 2, 1000, 8000)
    8
    """
    pieces = s // z
    wanted = ceil_div(s * row, max(limit, 1))
    count = next((n for n in range(wanted, pieces + 1) if pieces % n == 0), pieces)
    return s // count
