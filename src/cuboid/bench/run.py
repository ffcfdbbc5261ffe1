"""Runs a benchmark: counts every layout once, then layouts take turns in several rounds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count as count_up
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cuboid.bench.layouts import Layout
from cuboid.bench.problem import Problem
from cuboid.bench.result import Result, Row
from cuboid.bench.turn import Count, count, turn
from cuboid.comm.axis import Axis
from cuboid.comm.collectives import from_all
from cuboid.emulate.slow_motion import SlowMotion
from cuboid.run.cluster import Cluster, bits_per_second
from cuboid.run.launch import Pool, World, join_world
from cuboid.run.started import is_first, under_torchrun


@dataclass(frozen=True)
class Trial:
    """Layouts on one problem, one number of ranks, one network."""

    problem: Problem
    ranks: int
    layouts: Sequence[Layout]
    rate: str = ""
    slow: SlowMotion | None = None  # on emulated devices
    quick: bool = False


@dataclass(frozen=True)
class Pace:
    rounds: int = 5
    steps: int = 1  # timed in a row, each turn
    per_host: int = 4


class Ranks(Protocol):
    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


class Started:
    """The ranks that torchrun has started, of which this process is one. Each runs the whole benchmark, in lockstep."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._all = Axis("world", world.size, world.rank, dist.group.WORLD)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return from_all(fn(self.world, *args), self._all)


def bench(result: Result, trials: Sequence[Trial], pace: Pace, out: Path, console: Console) -> Result:
    """Runs all trials. Rows are added to the result and saved as they are measured."""
    counts = {(trial.problem, layout) for trial in trials for layout in trial.layouts}
    total = len(counts) + sum(len(trial.layouts) * pace.rounds for trial in trials)
    counted: dict[tuple[Problem, Layout], list[Count]] = {}
    with ExitStack() as stack:
        started = None
        if under_torchrun():
            started = Started(join_world())
            stack.callback(dist.destroy_process_group)
        told = stack.enter_context(_progress(total, console if is_first() else Console(quiet=True)))
        for trial in trials:
            missing = [c for c in trial.layouts if (trial.problem, c) not in counted]
            if missing:
                with _ranks(trial, pace, started, shaped=False) as ranks:
                    for layout in missing:
                        told(f"{trial.ranks} ranks: counting {layout.name}")
                        counted[trial.problem, layout] = ranks.run(count, layout, trial.problem, trial.slow)
            with _ranks(trial, pace, started, shaped=True) as ranks:
                rows = [_row(trial, layout, counted) for layout in trial.layouts]
                for i in range(pace.rounds):
                    for row in rows if i % 2 == 0 else reversed(rows):
                        where = f"{trial.ranks} ranks" + (f", {trial.rate}" if trial.rate else "")
                        told(f"{where}: round {i + 1} of {pace.rounds}, {row.layout.name}")
                        row.add(ranks.run(turn, row.layout, trial.problem, pace.steps, bool(trial.rate), trial.slow))
            result.rows += rows
            if is_first():
                result.save(out)
    return result


def _row(trial: Trial, layout: Layout, counted: dict[tuple[Problem, Layout], list[Count]]) -> Row:
    bits = bits_per_second(trial.rate) if trial.rate else 0.0
    counts = counted[trial.problem, layout]
    return Row(layout, trial.problem, trial.ranks, trial.rate, bits, counts, trial.slow, trial.quick)


@contextmanager
def _ranks(trial: Trial, pace: Pace, started: Started | None, shaped: bool) -> Iterator[Ranks]:
    if started is not None:
        if started.world.size != trial.ranks:
            raise ValueError(f"torchrun started {started.world.size} ranks but this needs {trial.ranks}; give --ranks")
        yield started
    elif shaped and trial.rate:
        hosts = -(-trial.ranks // pace.per_host)
        links = trial.slow.links if trial.slow is not None else trial.rate
        with Cluster(hosts, links, pace.per_host) as cluster, Pool(trial.ranks, cluster) as pool:
            yield pool
    else:
        with Pool(trial.ranks) as pool:
            yield pool


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, otherwise a line per turn. Call it with the name of what begins."""
    done = count_up()
    if not console.is_terminal:
        yield lambda text: console.print(f"[{next(done)}/{total}] {text}", markup=False, highlight=False)
        return
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, description=text, completed=next(done))
        progress.update(task, description="", completed=total)
