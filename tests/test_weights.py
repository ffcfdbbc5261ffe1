"""Where shards are in memory: in communication order, and if they were moved; which ones are separate messages."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from cuboid import Cuboid, CuboidParallel, Mesh, ModelConfig, Pool, Transformer, World
from cuboid.comm.transport.base import Transport
from cuboid.mesh.layout import shard_of
from cuboid.step.weights import joined

MODEL = ModelConfig("llama", layers=2, hidden=24, heads=4, ffn=48, vocab=16, context=8)


def test_weights_adjacent_shards_join_without_copy() -> None:
    whole = torch.arange(12.0).view(6, 2)
    first, second = whole[:2], whole[2:5]
    assert joined([first, second]).equal(whole[:5])
    assert joined([first, second]).data_ptr() == whole.data_ptr()
    for apart in ([second, first], [first, whole[3:5]], [first, second.clone()], [whole[:2, :1], whole[2:5, :1]]):
        copy = joined(apart)
        assert copy.equal(torch.cat(apart))
        assert copy.data_ptr() not in (whole.data_ptr(), apart[0].data_ptr())


def places(world: World, shape: Cuboid) -> set[int]:
    """Where the memory begins that the matrices of a block are in."""
    mesh = Mesh(shape, world.rank)
    model = Transformer(CuboidParallel(MODEL, mesh), seed=1)
    found = {shard_of(p).untyped_storage().data_ptr() for p in model.blocks[0].parameters() if p.dim() == 2}
    mesh.close()
    return found


@pytest.mark.parametrize("shape", [Cuboid(2, 2, 1), Cuboid(1, 2, 2), Cuboid(3, 2, 1)], ids=str)
def test_weights_of_a_block_share_one_buffer(shape: Cuboid, pool: Callable[[int], Pool]) -> None:
    assert [len(found) for found in pool(shape.ranks).run(places, shape)] == [1] * shape.ranks


def travelled(world: World, shape: Cuboid, dtype: torch.dtype | None, vocab: int) -> tuple[int, list[bool], list[bool]]:
    """How many pieces a block travels in where matrices are large, whether a step then sends the same bytes, and
    whether it has the same loss and gradients to the bit as where everything travels together."""
    mesh = Mesh(shape, world.rank)
    model, tokens = replace(MODEL, vocab=vocab), torch.arange(64).view(8, 8) % vocab
    pieces, counts, losses, gradients = [], [], [], []
    for least in (1 << 30, 128):
        with patch.object(Transport, "least_alone", least):
            one = Transformer(CuboidParallel(model, mesh, dtype=dtype), seed=1)
        pieces.append(len(one._buckets[one.blocks[0]].messages))
        mesh.ledger.reset()
        place = one.parallel.place(8, 8)
        losses.append(one(place.take(tokens, 0), place.take(tokens, -100), place))
        losses[-1].backward()
        counts.append(mesh.ledger.counts())
        gradients.append([shard_of(parameter.grad) for parameter in one.parameters()])
    mesh.close()
    assert pieces[0] == 1
    same = [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]
    return pieces[1], [counts[0] == counts[1], len(counts[0]) > 0], [bool(losses[0] == losses[1]), *same]


@pytest.mark.parametrize(
    ("shape", "dtype", "vocab"),
    [
        (Cuboid(2, 2, 1), None, 16),
        (Cuboid(3, 2, 1), None, 17),  # split unevenly
        (Cuboid(4, 1, 2), torch.bfloat16, 18),
        (Cuboid(3, 2, 2), None, 17),
    ],
    ids=str,
)
def test_weights_large_matrices_are_sent_separately(
    shape: Cuboid, dtype: torch.dtype | None, vocab: int, pool: Callable[[int], Pool]
) -> None:
    for pieces, counted, same in pool(shape.ranks).run(travelled, shape, dtype, vocab):
        assert pieces > 3
        assert all(counted)
        assert all(same)
