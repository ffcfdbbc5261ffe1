"""Fits hardware figures to measured times, and reports the error of each fit."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cuboid.mesh.cuboid import Cuboid
from cuboid.plan.calibrate.timing import Sample
from cuboid.plan.hardware import Hardware, Link
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import predict
from cuboid.plan.sizes import groups
from cuboid.plan.time import Array


def fit(columns: Sequence[Array], measured: Sequence[float]) -> tuple[list[float], float]:
    """Returns factors of at least 0, by least squares of the relative error, and the mean relative error."""
    y = np.array(measured)
    table = np.stack([np.asarray(column, dtype=float) for column in columns], 1) / y[:, None]
    active = list(range(len(columns)))
    while True:
        found, *_ = np.linalg.lstsq(table[:, active], np.ones(len(y)), rcond=None)
        if len(active) == 1 or (found >= 0).all():
            break
        active.pop(int(found.argmin()))
    factors = [0.0] * len(columns)
    for i, value in zip(active, found, strict=True):
        factors[i] = max(float(value), 0.0)
    return factors, float(np.abs(table @ np.array(factors) - 1).mean())


def fit_matmuls(shapes: Sequence[tuple[int, int, int]], measured: Sequence[float]) -> tuple[list[float], float]:
    """Seconds of a FLOP, of a FLOP's worth of output and of a launch. If noise hides the others, the first has all the
    time."""
    m, n, k = np.array(shapes, dtype=float).T
    factors, error = fit([2 * m * n * k, 2 * m * n, np.ones_like(m)], measured)
    if not factors[0]:
        (per_flop,), error = fit([2 * m * n * k], measured)
        factors = [per_flop, 0.0, 0.0]
    return factors, error


def fit_links(
    samples: Sequence[Sample], kind: str, node: int, direct: bool, stream: float, crossing: bool
) -> tuple[Link | None, float]:
    """Base, hop and bandwidth of one kind of collective, inside nodes or across; the features are time.py's."""
    rows, measured = [], []
    for each in samples:
        group = groups([each.cuboid], np.ones(1, dtype=np.int64), node)["y"]
        p, inside = int(group.size[0]), int(group.inside[0])
        if each.kind != kind or (inside < p) != crossing:
            continue
        scattered = kind == "reduce_scatter" and direct
        times = 2 if kind == "all_reduce" else 1
        rounds = 2 * np.log2(p / inside if crossing else p) if kind == "all_reduce" else p - 1
        moved = times * each.size * (p - 1) / p
        if crossing:
            moved = moved * node / inside if not scattered else each.size * (p - inside) / p * node
        summing = 3 * (p - 1) / p * each.size / stream if scattered else 0.0
        rows.append((1.0, float(rounds), moved))
        measured.append(max(each.seconds - summing, 0.2 * each.seconds))
    if not rows:
        return None, 0.0
    (base, hop, per_byte), error = fit(list(np.array(rows).T), measured)
    return Link(base, hop, 1 / per_byte if per_byte else 1e15), error


def fit_layers(hw: Hardware, layers: Sequence[tuple[Work, float]]) -> tuple[Hardware, float]:
    """The speed of elementwise operations and the time of the smallest one, fitted to the times of real layers."""

    def error(candidate: Hardware) -> float:
        gaps = [predict(candidate, work, Cuboid(), Choice()).seconds / seconds - 1 for work, seconds in layers]
        return float(np.abs(gaps).mean())

    streams = hw.stream * np.geomspace(0.1, 2, 14)
    launches = hw.launch * np.geomspace(0.3, 10, 12)
    candidates = [replace(hw, stream=float(s), launch=float(t)) for s in streams for t in launches]
    best = min(candidates, key=error)
    return best, error(best)
