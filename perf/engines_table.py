"""The tables of ``bench_engines.py``: by message size, and of the training step."""

from typing import Any

from measure import median
from rich.console import Console
from rich.table import Table

from hpctrain.core.units import format_bytes

OURS, SILENT = "hpctrain", "no communication"

Result = dict[str, Any]


def peers_of(result: Result) -> list[str]:
    """Return the methods that run on Horovod."""
    return [method for method in result["ways"] if method not in (OURS, SILENT)]


def rows_of(result: Result) -> list[dict[str, Any]]:
    """Return a row for each message size: milliseconds, and ratios to hpctrain."""
    methods = {method: found["sums"] for method, found in result["ways"].items() if found["sums"]}
    rows = []
    for size in next(iter(methods.values()), {}):
        times = {method: median(sums[size]) for method, sums in methods.items()}
        row = {"bytes": size} | {
            f"{method} ms": seconds * 1e3 for method, seconds in times.items()
        }
        if OURS in times:
            row |= {
                f"{method} / {OURS}": seconds / times[OURS]
                for method, seconds in times.items()
                if method != OURS
            }
        rows.append(row)
    return rows


def step_ratios(result: Result) -> dict[str, list[float]]:
    """Return, for each method, the time of the step over that of hpctrain: median, min, max."""
    methods = result["ways"]
    if OURS not in methods:
        return {}
    ours = methods[OURS]["steps"]
    ratios = {}
    for method, found in methods.items():
        if method != OURS:
            of_rounds = [theirs / mine for theirs, mine in zip(found["steps"], ours, strict=True)]
            middle = median(found["steps"]) / median(ours)
            ratios[method] = [middle, min(of_rounds), max(of_rounds)]
    return ratios


def show(console: Console, result: Result) -> None:
    """Print both tables of one world, and a summary."""
    if rows := rows_of(result):
        console.print(_by_size(result["world"], rows))
    console.print(_of_steps(result))
    ratios = step_ratios(result)
    for method in peers_of(result):
        if method in ratios:
            middle, least, most = ratios[method]
            console.print(
                f"training step, {method} / {OURS}: {middle:.2f} ({least:.2f} to {most:.2f} "
                "in the rounds)"
            )
    console.print()


def _by_size(world: str, rows: list[dict[str, Any]]) -> Table:
    title = f"{world}: one all-reduce, milliseconds"
    table = Table(title=title, title_justify="left", title_style="bold")
    for head in ("message", *list(rows[0])[1:]):
        lines = head.removesuffix(" ms").replace(", ", ",\n").replace(" / ", "\n/ ")
        table.add_column(lines, justify="right")
    for row in rows:
        size, *values = row.values()
        cells = (
            f"{value:.2f}" if "/" in name else f"{value:.3f}"
            for name, value in zip(list(row)[1:], values, strict=True)
        )
        table.add_row(format_bytes(size), *cells)
    return table


def _of_steps(result: Result) -> Table:
    title = f"{result['world']}: training step, milliseconds"
    table = Table(title=title, title_justify="left", title_style="bold")
    heads = ("median", "fastest round", "slowest round", "waits, by our clock", f"/ {SILENT}")
    for head in ("way", *heads):
        table.add_column(head, justify="left" if head == "way" else "right")
    methods = result["ways"]
    silent = median(methods[SILENT]["steps"]) if SILENT in methods else None
    for method, found in methods.items():
        steps = found["steps"]
        shown = (median(steps), min(steps), max(steps), median(found["exposed"]))
        cells = (f"{seconds * 1e3:.1f}" for seconds in shown)
        table.add_row(method, *cells, f"{median(steps) / silent:.2f}" if silent else "")
    return table
