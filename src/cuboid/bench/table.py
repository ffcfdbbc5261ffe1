"""A benchmark's result as a person reads it."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from cuboid.bench.result import MOST_CPU, Result, Row
from cuboid.train.progress import quantity

LEAST_NETWORK = 0.7  # of a step that bytes ÷ rate must explain for its ratios to speak of the network


def show(result: Result, console: Console) -> None:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in result.rows:
        groups.setdefault((row.rate, row.ranks), []).append(row)
    for (rate, ranks), rows in groups.items():
        slow = rows[0].slow
        if slow is not None:
            console.print(_slow_table(rows, f"{ranks} ranks, {slow}"))
        else:
            console.print(_table(rows, f"{ranks} ranks, {rate + ' a host' if rate else 'links unshaped'}"))
        for line in _remarks(rows) if slow is None else _slow_remarks(rows):
            console.print(line, highlight=False)


def _framed(columns: Sequence[str], rows: Sequence[Row], more: Callable[[Row], list[str]], title: str) -> Table:
    """Every row's name and times, then what `more` says of it."""
    first, fastest = rows[0].spread("step").median, min(row.spread("step").median for row in rows)
    times = ["layout", "step", "quartiles", "fwd", "bwd", "opt", f"× {rows[0].contestant.way}"]
    table = Table(*times, *columns, title=title, title_justify="left")
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column.header == "layout" else "right", True
    for row in rows:
        step = row.spread("step")
        cells = [row.contestant.name, f"{step.median:.3g}", f"{step.low:.3g}–{step.high:.3g}"]
        cells += [f"{row.spread(part).median:.3g}" for part in ("forward", "backward", "optimizer")]
        cells += [f"{first / step.median:.2f}", *more(row)]
        table.add_row(*cells, style="bold" if step.median == fastest else "")
    return table


def _slow_table(rows: Sequence[Row], title: str) -> Table:
    """Of emulated devices: no values, so no losses."""

    def more(row: Row) -> list[str]:
        step = row.spread("step").median
        shares = [f"{row.spread(part).median / step:.0%}" for part in ("busy", "exposed")]
        levels = [row.sent, row.spread("inside").median, row.spread("crossed").median]
        sent = [quantity(each) if each else "–" for each in levels]
        planned = "–" if row.planned is None else f"{row.planned:.3g}"
        return [*shares, *sent, planned, f"{row.cpu_share:.0%} {row.counts_as}".strip()]

    return _framed(["busy", "exposed", "sent", "inside", "crossed", "planned", "CPU"], rows, more, title)


def _slow_remarks(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Emulated devices: local work is timed, not done; messages are real. Seconds a step; busy, exposed: of the "
        "step, a device computing and waiting for messages; sent: bytes of a rank; inside, crossed: bytes the "
        "busiest host's ranks sent to one another and to other hosts; planned: seconds by the planner for "
        "the same figures; CPU: of the cores' time, the ranks' own."
    ]
    wrong = [row.contestant.name for row in rows if not row.as_predicted]
    lines.append(f"Bytes differ from the formula: {', '.join(wrong)}." if wrong else "Bytes equal the formula's.")
    for how in ("rough", "not counted"):
        names = ", ".join(row.contestant.name for row in rows if row.counts_as == how)
        if names:
            lines.append(
                f"{how.capitalize()}: {names}: the ranks' own work took more than {MOST_CPU:.0%}; use a larger factor."
            )
    return lines


def _table(rows: Sequence[Row], title: str) -> Table:
    shaped = bool(rows[0].rate)

    def more(row: Row) -> list[str]:
        cells = [quantity(row.sent)]
        if shaped:
            cells += [quantity(row.spread("crossed").median), f"{row.spread('network').median:.0%}"]
        waited = row.spread("exposed").median / row.spread("step").median
        cells += ["–" if row.contestant.native else f"{waited:.0%}", quantity(row.peak)]
        return [*cells, f"{max(count.flops for count in row.counts) / 1e9:.2f}"]

    columns = ["sent", *(["crossed", "network"] if shaped else []), "waited", "peak", "GFLOP"]
    return _framed(columns, rows, more, title)


def _remarks(rows: Sequence[Row]) -> list[str]:
    crossed = "; crossed: bytes the busiest host sent to others; network: their time at the link's rate" * bool(
        rows[0].rate
    )
    lines = [f"Seconds a step; sent, peak: bytes of a rank{crossed}; waited: of the step, for communication."]
    wrong = [row.contestant.name for row in rows if not row.as_predicted]
    lines.append(f"Bytes differ from the formula: {', '.join(wrong)}." if wrong else "Bytes equal the formula's.")
    if rows[0].rate:
        network = {row.contestant.name: row.spread("network").median for row in rows}
        least = min(network, key=lambda name: network[name])
        says = (
            "so the ratios are the network's"
            if network[least] >= LEAST_NETWORK
            else "too little for its ratio to count"
        )
        lines.append(f"Bytes ÷ rate explain at least {network[least]:.0%} of a step ({least}), {says}.")
    return lines
