"""What is done on a GPU alone, against a pretended one that notes what it is told, in which order."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import on, tiny, write_text
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid import device
from cuboid.comm.axis import Axis
from cuboid.comm.flight import Launched
from cuboid.comm.ledger import Ledger
from cuboid.device import DeviceClock, HostCopies, upload
from cuboid.mesh.layout import shard_of
from cuboid.run.launch import World
from cuboid.train import writer
from cuboid.train.checkpoint import tensors
from cuboid.train.config import TrainConfig
from cuboid.train.garbage import EVERY, collected_by_hand
from cuboid.train.loop import Trainer, run_on_rank
from cuboid.train.writer import Writer

GPU = torch.device("cuda", 0)


class Told(list[str]):
    """What the pretended GPU was told. Its clock, in ms, is not the host's."""

    now = 0.0


class Event:
    def __init__(self, told: Told, name: str = "event") -> None:
        self.told, self.name, self.time = told, name, told.now

    def record(self) -> None:
        self.time = self.told.now

    def synchronize(self) -> None:
        self.told.append(f"host waits for {self.name}")

    def elapsed_time(self, other: "Event") -> float:
        return other.time - self.time


class Stream:
    def __init__(self, told: Told, name: str) -> None:
        self.told, self.name = told, name

    def wait_stream(self, other: "Stream") -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.told.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        return Event(self.told, "copies")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    log = Told()

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        log.append(f"in {entered.name}")
        yield
        log.append(f"out of {entered.name}")

    class Locked(Tensor):
        def copy_(self, x: Tensor, non_blocking: bool = False) -> Tensor:
            log.append("copied" if non_blocking else "copied, host waits")
            return super().copy_(x)

    def page_locked(like: Tensor) -> Tensor:
        log.append("page-locked memory")
        return torch.empty(like.shape, dtype=like.dtype).as_subclass(Locked)

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(log, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(log, "main"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(log))
    monkeypatch.setattr(device, "page_locked", page_locked)
    return log


def test_host_copies_leave_host_and_main_stream_at_work(told: Told) -> None:
    copies, x = HostCopies(GPU), torch.ones(3)
    copies.hold()
    copies.land()
    assert told == []  # nothing to wait for yet
    found = copies.launch({"x": x})
    assert told == ["side waits for main", "in side", "page-locked memory", "copied", "out of side"]
    told.clear()
    copies.hold()
    copies.land()
    assert told == ["main waits for copies", "host waits for copies"]
    again = copies.launch({"x": 2 * x})
    assert "page-locked memory" not in told  # the same one is reused
    assert again["x"] is found["x"]
    assert again["x"].tolist() == [2, 2, 2]


def test_host_copies_on_cpu_are_there_at_once() -> None:
    x = torch.ones(3)
    found = HostCopies(torch.device("cpu")).launch({"x": x})["x"]
    at_once = HostCopies(torch.device("cpu"), background=False).launch({"x": x})["x"]
    x.zero_()
    assert found.tolist() == [1, 1, 1]
    assert at_once is x  # nothing is computed until it is written


def test_upload_goes_through_page_locked_memory_without_waiting(told: Told) -> None:
    copied = list[Any]()

    class Out(Tensor):
        device = GPU

        def copy_(self, x: Tensor, non_blocking: bool = False) -> Tensor:
            copied.append((type(x).__name__, non_blocking))
            return super().copy_(x.as_subclass(Tensor))

    out = upload(torch.ones(2), torch.zeros(2).as_subclass(Out))
    assert told[0] == "page-locked memory"
    assert copied == [("Locked", True)]
    assert out.tolist() == [1, 1]


def writes(world: World, config: TrainConfig, folder: Path) -> list[str]:
    """The order in which a checkpoint of a run is copied, held and written."""
    seen = list[str]()

    class Copies(HostCopies):
        def launch(self, tensors: Any) -> dict[str, Tensor]:
            seen.append("launch")
            return super().launch(tensors)

        def hold(self) -> None:
            seen.append("hold")

        def land(self) -> None:
            seen.append("land")

    before, writer.HostCopies = writer.HostCopies, Copies  # type: ignore[misc]
    try:
        trainer = Trainer(config, world)
        saving = Writer(folder, trainer.model, 1, background=False)
    finally:
        writer.HostCopies = before  # type: ignore[misc]
    trainer.optimizer.register_step_post_hook(lambda *_: seen.append("update"))
    trainer.step()
    for _ in range(2):
        saving.save(trainer.done, trainer.optimizer, trainer.state())
        trainer.step()
        trainer.step()
    return seen


def test_writer_holds_next_update_alone_until_copies_are_made(tmp_path: Path, pool) -> None:
    config = tiny(write_text(tmp_path), *on("1,1,1"))
    (seen,) = pool(1).run(writes, config, tmp_path / "saved")
    assert seen == ["update", *["launch", "land", "hold", "update", "update"] * 2]


class Seen(TorchDispatchMode):
    """How often weights were copied, and their bytes. What ranks tell each other is of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copies = func.__name__.partition(".")[0] in ("_to_copy", "clone", "copy_", "contiguous", "cat")
        if copies and out.is_floating_point():
            self.copies, self.bytes = self.copies + 1, self.bytes + out.nbytes
        return out


def copied(world: World, config: TrainConfig, folder: Path) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Tensors of a rank's part of a checkpoint, and their bytes; how many were copied to make it, and to write it."""
    trainer = Trainer(config, world)
    saving, found, kept = Writer(folder, trainer.model, 1, background=True), list[tuple[int, int]](), dict[str, Any]()

    def made() -> None:
        kept.update(tensors(trainer.model, trainer.optimizer, saving._copies.launch))

    def written() -> None:
        saving._write(1, kept, trainer.state())
        saving.wait()  # it raises what went wrong

    for do in (made, written):
        with Seen() as seen:
            do()
        found.append((seen.copies, seen.bytes))
    return (len(kept), sum(shard_of(x).nbytes for x in kept.values())), found


def test_checkpoint_copies_each_tensor_once(tmp_path: Path, pool) -> None:
    config = tiny(write_text(tmp_path), *on("1,2,1"))
    for whole, (made, written) in pool(2).run(copied, config, tmp_path / "saved"):
        assert made == whole
        assert written == (0, 0)


def garbage(world: World, config: TrainConfig) -> int:
    """What some steps leave behind that the collector alone finds."""
    trainer = Trainer(config, world)
    trainer.step()
    gc.collect()
    with collected_by_hand():
        for _ in range(3):
            trainer.step()
        return gc.collect()


def test_step_leaves_no_garbage_to_collect(tmp_path: Path, pool) -> None:
    more = "model.dropout=0.1", "memory.recompute=full", "data.micro_batches=2"
    assert pool(2).run(garbage, tiny(write_text(tmp_path), *on("1,2,1"), *more)) == [0, 0]


def collecting(world: World, config: TrainConfig, folder: Path) -> list[bool]:
    """Whether Python collects garbage by itself in each step of a run, and after it."""
    seen, step = list[bool](), Trainer.step

    def spied(trainer: Trainer, stop: bool = False) -> Any:
        seen.append(gc.isenabled())
        return step(trainer, stop)

    Trainer.step = spied  # type: ignore[method-assign]
    try:
        run_on_rank(world, config, folder, None, trace=0, force=True)
    finally:
        Trainer.step = step  # type: ignore[method-assign]
    return [*seen, gc.isenabled()]


def test_run_collects_garbage_by_hand(tmp_path: Path, pool) -> None:
    config = tiny(write_text(tmp_path), *on("1,1,1"), "schedule.steps=2", "schedule.warmup=0")
    assert pool(1).run(collecting, config, tmp_path / "run") == [[False, False, True]]


def test_garbage_is_collected_in_the_same_steps_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    monkeypatch.setattr(gc, "collect", lambda generation: seen.append(step))
    with collected_by_hand() as collect:
        assert not gc.isenabled()
        for step in range(1, 2 * EVERY + 2):
            collect(step)
    assert gc.isenabled()
    assert seen == [EVERY, 2 * EVERY]


class Work:
    def wait(self) -> None:
        pass


def test_spans_and_phases_are_read_from_one_clock(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches at once what the device comes to seconds later: both must be told by the device's clock."""
    monkeypatch.setattr(device, "any_gpu", lambda: True)
    clock = DeviceClock(GPU)
    ledger = Ledger()
    ledger.spans, ledger.clock = [], clock
    began = clock.mark()
    told.now = 4000.0  # the device is at work for four seconds, the host launches meanwhile
    span = ledger.launched("y", "all_gather", 8)

    class Timed:
        def stamp(self, *_: Any) -> device.Stamps:
            return device.Stamps(1)

    flight = Launched([Work()], lambda: torch.ones(1), span, Axis("y", 2, 0, ledger=ledger, transport=Timed()))  # type: ignore
    told.now = 5000.0
    flight.wait()
    ended = clock.mark()
    ledger.settle()
    start, stop = clock.read(began), clock.read(ended)
    assert stop - start == pytest.approx(5)
    assert span.launched - start == pytest.approx(4)
    assert span.waited - start == pytest.approx(5)
    assert start <= span.launched <= span.waited <= span.landed <= stop


def test_device_clock_on_cpu_is_the_hosts() -> None:
    clock = DeviceClock(torch.device("cpu"))
    a, b = clock.mark(), clock.mark()
    assert clock.read(a) <= clock.read(b)
