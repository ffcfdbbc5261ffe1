"""A benchmark's result as tables."""

from collections.abc import Callable, Sequence
from functools import partial

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cuboid.bench.result import MOST_CPU, MOST_CPU_ROUGH, Result, Row
from cuboid.train.progress import quantity

#: The cells of a row, by the column's header.
Columns = dict[str, Callable[[Row], str]]

LEAST_NETWORK = 0.7  # share of a step that bytes ÷ rate must explain for its ratios to be about the network


def show(result: Result, console: Console) -> None:
    """Two tables per network and number of ranks, each within 80 columns: times, then what they consist of."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in result.rows:
        groups.setdefault((row.rate, row.ranks), []).append(row)
    for (rate, ranks), rows in groups.items():
        slow = rows[0].slow
        where = str(slow) if slow is not None else f"{rate} per host" if rate else "links unshaped"
        console.print(_table(rows, _times(rows), f"{ranks} ranks, {where}"))
        console.print()
        console.print(_table(rows, _details(rows) if slow is None else _slow_details()))
        for line in _remarks(rows) if slow is None else _slow_remarks(rows):
            console.print(line, highlight=False)


def _table(rows: Sequence[Row], columns: Columns, title: str | None = None) -> Table:
    fastest = min(row.spread("step").median for row in rows)
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("layout", no_wrap=True)
    for header in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        cells = [cell(row) for cell in columns.values()]
        table.add_row(row.layout.name, *cells, style="bold" if row.spread("step").median == fastest else "")
    return table


def _times(rows: Sequence[Row]) -> Columns:
    """Seconds of a step and of its phases, and its speed relative to the first layout's."""
    first = rows[0]

    def quartiles(row: Row) -> str:
        return f"{row.spread('step').low:.3g}–{row.spread('step').high:.3g}"

    def faster(row: Row) -> str:
        return f"{first.spread('step').median / row.spread('step').median:.2f}"

    columns: Columns = {"step": partial(_median, "step"), "quartiles": quartiles}
    columns |= {"fwd": partial(_phase, "forward"), "bwd": partial(_phase, "backward")}
    columns |= {"opt": lambda row: f"{row.spread('optimizer').median:.2g}"}
    columns |= {f"× {first.layout.way}".replace(" ", "\n"): faster}
    if first.slow is not None:
        columns["planned"] = lambda row: "–" if row.planned is None else f"{row.planned:.3g}"
    return columns


def _median(part: str, row: Row) -> str:
    return f"{row.spread(part).median:.3g}"


def _phase(part: str, row: Row) -> str:
    """On a pipe forwards and backwards alternate."""
    return "–" if row.layout.shape.pipe > 1 else _median(part, row)


def _share(part: str, row: Row) -> str:
    return f"{row.spread(part).median / row.spread('step').median:.0%}"


def _bytes(level: str, row: Row) -> str:
    found = row.spread(level).median
    return quantity(found) if found else "–"


def _slow_details() -> Columns:
    """The columns for emulated devices, which compute no values and so no losses."""
    return {
        "busy": partial(_share, "busy"),
        "exposed": partial(_share, "exposed"),
        "sent": lambda row: quantity(row.sent),
        "inside": partial(_bytes, "inside"),
        "crossed": partial(_bytes, "crossed"),
        "CPU": lambda row: f"{row.cpu_share:.0%}",
        "counts": lambda row: {"": "yes", "rough": "rough"}.get(row.counts_as, "no"),
    }


def _details(rows: Sequence[Row]) -> Columns:
    shaped: Columns = {
        "crossed": partial(_bytes, "crossed"),
        "network": lambda row: f"{row.spread('network').median:.0%}",
    }
    return {
        "sent": lambda row: quantity(row.sent),
        **(shaped if rows[0].rate else {}),
        "waited": lambda row: "–" if row.layout.native else _share("exposed", row),
        "peak": lambda row: quantity(row.peak),
        "GFLOP": lambda row: f"{max(count.flops for count in row.counts) / 1e9:.2f}",
    }


def _slow_remarks(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Emulated devices: local work is timed, not done; messages are real. Seconds per step; busy, exposed: of the "
        "step, a device computing and waiting for messages; sent: bytes of a rank; inside, crossed: bytes the "
        "busiest host's ranks sent to one another and to other hosts; planned: seconds by the planner for "
        "the same figures; CPU: of the cores' time, the ranks' own; "
        f"counts: whether that is at most {MOST_CPU:.0%}, or with --quick at most {MOST_CPU_ROUGH:.0%}, which is rough."
    ]
    lines += _of_pipes(rows)
    wrong = [row.layout.name for row in rows if not row.as_predicted]
    lines.append(f"Bytes differ from the formula: {', '.join(wrong)}." if wrong else "Bytes equal the formula's.")
    for how in ("rough", "not counted"):
        names = ", ".join(row.layout.name for row in rows if row.counts_as == how)
        if names:
            lines.append(f"{how.capitalize()}: {names}: the ranks' own work took too much; use a larger factor.")
    return lines


def _of_pipes(rows: Sequence[Row]) -> list[str]:
    """The schedules and micro-batches of pipes that are not planned, whose names do not have them."""
    pipes = [row.layout for row in rows if row.layout.shape.pipe > 1 and row.layout.choice is None]
    return list(dict.fromkeys(f"On pipes: {of.pipeline}, {of.micro_batches} micro-batches." for of in pipes))


def against_native(rows: Sequence[Row]) -> str:
    """Compares our fastest with the fastest of PyTorch's own; "" unless both are among the rows."""
    ours = [row for row in rows if row.layout.cuboidal]
    theirs = [row for row in rows if row.layout.native]
    if not ours or not theirs:
        return ""
    best, rival = (min(group, key=lambda row: row.spread("step").median) for group in (ours, theirs))
    ratio = rival.spread("step").median / best.spread("step").median
    apart = best.spread("step").high < rival.spread("step").low
    names = f"{best.layout.name} against {rival.layout.name}, the fastest of PyTorch's own"
    return f"{names}: {ratio:.2f} × as fast" + ("." if apart else "; there is nothing to gain here.")


def _remarks(rows: Sequence[Row]) -> list[str]:
    crossed = "; crossed: bytes the busiest host sent to others; network: their time at the link's rate" * bool(
        rows[0].rate
    )
    lines = [f"Seconds per step; sent, peak: bytes of a rank{crossed}; waited: of the step, for communication."]
    lines += _of_pipes(rows)
    wrong = [row.layout.name for row in rows if not row.as_predicted]
    lines.append(f"Bytes differ from the formula: {', '.join(wrong)}." if wrong else "Bytes equal the formula's.")
    if rows[0].rate:
        network = {row.layout.name: row.spread("network").median for row in rows}
        least = min(network, key=lambda name: network[name])
        says = (
            "so the ratios are the network's"
            if network[least] >= LEAST_NETWORK
            else "too little for its ratio to count"
        )
        lines.append(f"Bytes ÷ rate explain at least {network[least]:.0%} of a step ({least}), {says}.")
    return [*lines, *filter(None, [against_native(rows)])]
