"""Tokens to batches: every sample once, in an order that no rank has to look up, and a rank reads its own part."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.data import (
    PADDED_TARGET,
    Batch,
    ByteTokenizer,
    Loader,
    Samples,
    shuffled,
)
from cuboid.mesh.place import Index, Place
from cuboid.model.cuboid import dealt

BYTES = ByteTokenizer()


def place(batch: int, seq: int, samples: Tensor, positions: Tensor) -> Place:
    index = Index(positions, samples, torch.arange(0))
    return Place(batch, seq, 0, samples, positions, Axis("x", 1, 0), index, index)


# The order


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4097])
def test_shuffled_epoch_is_permutation(n: int) -> None:
    for epoch in (0, 1, 5):
        places = shuffled(torch.arange(n) + epoch * n, n, seed=3)
        assert sorted(places.tolist()) == list(range(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_shuffled_any_epoch_and_seed_is_permutation(n: int, seed: int, epoch: int) -> None:
    places = shuffled(torch.arange(n) + epoch * n, n, seed)
    assert sorted(places.tolist()) == list(range(n))


def test_shuffled_order_differs_by_seed_and_epoch() -> None:
    n = 1000
    first = shuffled(torch.arange(n), n, seed=0)
    for other in (torch.arange(n), shuffled(torch.arange(n), n, seed=1), shuffled(torch.arange(n) + n, n, seed=0)):
        assert (first == other).sum() < 10  # one is expected by chance
    assert abs(torch.corrcoef(torch.stack((first.double(), torch.arange(n).double())))[0, 1]) < 0.15


def test_shuffled_positions_are_uniform() -> None:
    n, epochs = 5, 4000
    places = shuffled(torch.arange(n * epochs), n, seed=0).view(epochs, n)
    counts = torch.stack([torch.bincount(column, minlength=n) for column in places.T])
    assert (counts - epochs / n).abs().max() < 6 * (epochs / n) ** 0.5


def test_shuffled_order_is_stable_across_versions() -> None:
    """A change here changes every run that is resumed."""
    assert shuffled(torch.arange(8), 1000, seed=0).tolist() == [211, 818, 104, 365, 244, 410, 126, 716]


def test_shuffled_handles_huge_index_without_memory() -> None:
    n = 10**12 + 39
    index = torch.tensor([0, 1, n - 1, n, 10**17])
    assert ((shuffled(index, n, 0) >= 0) & (shuffled(index, n, 0) < n)).all()
    assert shuffled(index[3:4], n, 0).equal(shuffled(index, n, 0)[3:4])


# Samples and what a rank reads of them


def serial(samples: Samples, batch: int, step: int) -> tuple[Tensor, Tensor]:
    return Loader(samples, place(batch, samples.seq, torch.arange(batch), torch.arange(samples.seq)))(step)


def test_samples_targets_are_next_tokens() -> None:
    text = np.arange(1, 101, dtype=np.uint16)
    samples = Samples(text, seq=7, seed=5)
    assert len(samples) == 14
    tokens, targets = serial(samples, 14, 0)
    assert tokens.dtype == targets.dtype == torch.int64
    assert targets.equal(tokens + 1)
    assert sorted(tokens.flatten().tolist()) == list(range(1, 99))  # every sample once
    assert (tokens[0] - 1 == samples.windows(torch.arange(14)) * 7).all()


@pytest.mark.parametrize(
    ("batch", "seq", "rows", "context", "unit"),
    [
        (6, 12, 3, 1, 1),  # the batch over x
        (6, 12, 1, 3, 6),  # the sequence over x, zigzag
        (4, 10, 2, 2, 12),  # both, and the sequence padded
        (5, 9, 3, 1, 4),  # both padded
    ],
)
def test_loader_rank_shards_join_to_serial_batch(batch: int, seq: int, rows: int, context: int, unit: int) -> None:
    samples = Samples(np.random.default_rng(0).integers(0, 9999, 611).astype(np.uint16), seq, seed=1)
    padded_seq, padded_batch = -(-seq // unit) * unit, -(-batch // rows) * rows
    for step in (0, 1, 40):  # the last beyond the first epoch
        whole = serial(samples, batch, step)
        joined = [torch.full((padded_seq, padded_batch), -7) for _ in whole]
        for row in range(rows):
            for part in range(context):
                mine = torch.arange(padded_batch).chunk(rows)[row]
                positions = torch.cat(dealt(padded_seq, context, part))
                where = place(batch, seq, mine, positions)
                got = Loader(samples, where)(step)
                for whole_i, fill, joined_i, got_i in zip(whole, (0, PADDED_TARGET), joined, got, strict=True):
                    assert got_i.equal(where.take(whole_i.T, fill))
                    joined_i[positions[:, None], mine] = got_i
        for whole_i, fill, joined_i in zip(whole, (0, PADDED_TARGET), joined, strict=True):
            assert joined_i[:seq, :batch].equal(whole_i)
            assert (joined_i[seq:] == fill).all()
            assert (joined_i[:, batch:] == fill).all()


def test_loader_prefetch_serves_same_batches_and_keeps_no_others() -> None:
    tokens, reads = np.arange(200), list[list[int]]()
    samples = Samples(tokens, 4, seed=0)
    where, read = place(2, 4, torch.arange(2), torch.arange(4)), samples.read

    def noted(numbers: Tensor, positions: Tensor) -> Batch:
        reads.append(numbers.tolist())
        return read(numbers, positions)

    plain, ahead = Loader(samples, where), Loader(samples, where)
    wanted = [plain(step) for step in range(4)]
    samples.read = noted  # type: ignore[method-assign]
    ahead.prefetch([0, 1])
    ahead.prefetch([1, 2])  # 0 is no longer wanted
    assert reads == [[0, 1], [2, 3], [2, 3], [4, 5]]
    found = {step: ahead(step) for step in (1, 2, 0)}
    assert all(all(map(torch.equal, batch, wanted[step])) for step, batch in found.items())
    assert reads[4:] == [[0, 1]]
    ahead.prefetch([3])
    last = ahead(3)
    assert last.tokens.data_ptr() == found[1].tokens.data_ptr()  # the same memory again
    assert all(map(torch.equal, last, wanted[3]))


def test_samples_resumed_stream_is_tail_of_whole() -> None:
    text = np.arange(500, dtype=np.uint16)
    whole = Samples(text, 8, seed=2).read(torch.arange(200), torch.arange(8))
    resumed = Samples(text, 8, seed=2).read(torch.arange(77, 200), torch.arange(8))
    assert resumed.tokens.equal(whole.tokens[:, 77:])
    assert resumed.targets.equal(whole.targets[:, 77:])


def test_loader_two_batches_equal_one_of_twice_the_size() -> None:
    samples = Samples(np.arange(500, dtype=np.uint16), 8, seed=2)
    halves = torch.cat((serial(samples, 4, 6)[0], serial(samples, 4, 7)[0]), dim=1)
    assert halves.equal(serial(samples, 8, 3)[0])


def test_loader_validation_reads_each_sample_once_in_order() -> None:
    samples = Samples(np.arange(1, 25, dtype=np.uint16), 4)
    assert len(samples) == 5
    tokens, targets = (
        torch.cat(parts, dim=1) for parts in zip(*(serial(samples, 3, t) for t in range(2)), strict=True)
    )
    assert tokens.T.flatten().tolist() == [*range(1, 21), 0, 0, 0, 0]
    assert targets.T.flatten().tolist() == [*range(2, 22), *[PADDED_TARGET] * 4]


def test_samples_read_only_requested_positions() -> None:
    class Watched:
        asked: list[int] = []  # noqa: RUF012  one test's own

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: np.ndarray) -> np.ndarray:
            self.asked += index.flatten().tolist()
            return np.zeros(index.shape, np.uint16)

    tokens = Watched()
    Samples(tokens, 100, seed=0).read(torch.tensor([0, 5]), torch.tensor([3, 4, 90]))
    assert len(tokens.asked) == 2 * 2 * 3
    assert {i % 100 for i in tokens.asked} == {3, 4, 5, 90, 91}


def test_samples_rejects_too_little_text() -> None:
    assert len(Samples(np.zeros(17, np.uint16), 16)) == 1
    with pytest.raises(ValueError, match=r"16 tokens but a sample of seq=16 needs 17.*more text or seq of at most 15"):
        Samples(np.zeros(16, np.uint16), 16)
    with pytest.raises(ValueError, match=r"0 tokens .* use more text$"):
        Samples(np.zeros(0, np.uint16), 16)
    with pytest.raises(ValueError, match="seq=0"):
        Samples(np.zeros(9, np.uint16), 0)


def test_loader_rejects_place_of_other_length() -> None:
    samples = Samples(np.zeros(100, np.uint16), 8)
    with pytest.raises(ValueError, match="0 to 9 but samples have 0 to 8"):
        Loader(samples, place(2, 9, torch.arange(2), torch.arange(9)))
