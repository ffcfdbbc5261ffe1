"""A rank's step on fake CUDA tensors with NCCL's branches taken: no tensor of the host's meets the device's, the host
waits for nothing, and a layer launches no more than it has.

How kernels are counted, those that torch.compile fuses among them: counting.py.
"""

from collections.abc import Callable
from typing import Any

import pytest

Emulate = Callable[..., Any]

#: Kernels besides matmuls and attention, calls of NCCL's, and events that a layer has at most, forward and backward, of
#: the steps of shapes.py. To lower, not to raise.
MOST = {
    "x": (52, 3, 3),
    "x without prefetch": (52, 3, 3),
    "y": (90, 20, 9),
    "z in fp32": (70, 28, 12),
    "xyz in four": (197, 99, 42),
    "xyz recomputed": (149, 71, 30),
    "xyz, attention recomputed": (69, 27, 12),
    "xyz in chunks and fp16": (135, 47, 18),  # chunks are summed in fp32
    "x through the sequence": (69, 15, 12),
    "few key heads, retained": (125, 24, 3),
    "replicas, beside": (188, 35, 18),
}

#: The same of all that the first rank of a pipe does for two micro-batches.
MOST_OF_PIPE = {"kernels": 382, "calls": 116, "events": 42}

#: Of Llama-3-8B's layer on a batch of 8 × 8192 in bf16, at the default schedule of a GPU: kernels, calls, GB that
#: elementwise kernels read and write; and GB of all that is no layer. Before fusing it was 179, 24, 22.6 and 451.6 on
#: 8,1,1, 607, 120, 36.0 and 276.6 on 2,2,2.
BUDGETS = {"8,1,1": (90, 6, 10.5, 150.5), "2,2,2": (220, 120, 16.0, 92.2)}


#: Without what others have, in `make test-all` alone.
RARE = "x without prefetch", "xyz recomputed"


@pytest.mark.parametrize(
    "names",
    [[name for name in MOST if name not in RARE], pytest.param([*RARE], marks=pytest.mark.slow)],
    ids=["most", "rare"],
)
def test_gpu_step_launches_no_more_than_it_has(names: list[str], emulate: Emulate) -> None:
    found = emulate("shapes.py", "cases", *names)
    assert {name: each["waits"] for name, each in found.items() if each["waits"]} == {}
    counts = {name: (each["kernels"], each["calls"], each["events"]) for name, each in found.items()}
    assert {name: of for name, of in counts.items() if any(a > b for a, b in zip(of, MOST[name], strict=True))} == {}


def test_gpu_step_of_llama_is_within_its_budget(emulate: Emulate) -> None:
    found = emulate("shapes.py", "budgets")
    for cuboid, (kernels, calls, size, rest) in BUDGETS.items():
        layer = found[cuboid]["layer"]
        assert layer["kernels"] <= kernels, cuboid
        assert layer["calls"] <= calls, cuboid
        assert layer["GB"] <= size, cuboid
        assert found[cuboid]["rest"]["GB"] <= rest, cuboid


@pytest.mark.parametrize("ranks", ["ends", pytest.param("all", marks=pytest.mark.slow)])
def test_gpu_step_launches_in_one_order_on_all_ranks(ranks: str, emulate: Emulate) -> None:
    """NCCL: communicators that are used at once must be used in one order."""
    names = "replicas, beside", "xyz in four"
    for name, found in emulate("shapes.py", "orders", ranks, *names).items():
        assert len(found) == (8 if ranks == "all" else 2)
        assert len(found[0]) > 20, name
        orders = [[(axis, kind) for axis, kind, *_ in launched] for launched in found]
        assert all(order == orders[0] for order in orders), name


def test_gpu_pipe_launches_in_one_order_at_each_place_and_message_ends_agree(emulate: Emulate) -> None:
    """NCCL: both ranks of a lane must have the same messages, of the same size, in the same order."""
    found = emulate("shapes.py", "pipe")
    ranks = found["launched"]
    assert all(found[name] <= most for name, most in MOST_OF_PIPE.items())
    lanes: dict[Any, dict[int, Any]] = {}
    for place in (range(2), range(2, 4)):
        orders = [[what for *what, _ in ranks[rank]] for rank in place]  # without the ranks that meet
        assert len(orders[0]) > 100
        assert all(order == orders[0] for order in orders)
    for rank, launched in enumerate(ranks):
        for axis, *message, ends in launched:
            if axis.startswith("pipe "):
                lanes.setdefault((axis, *ends), {}).setdefault(rank, []).append(message)
    assert len(lanes) == 2 * 4  # forward and backward, and both around
    for (_, *ends), messages in lanes.items():
        one, other = (messages[rank] for rank in ends)
        assert one == other
        assert len(one) >= 2 * 2  # micro-batches, sub-batches


def test_gpu_step_that_is_broken_is_noticed(emulate: Emulate) -> None:
    planted = "a host's tensor", "a value read back", "one more kernel"
    found = emulate("shapes.py", "broken", *planted)
    assert [each for each in planted if "error" in found[each]] == list(planted[:2])
    assert found[planted[2]]["kernels"] > MOST["x"][0]
