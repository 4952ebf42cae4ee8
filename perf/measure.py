"""Parts that all benchmarks share: interleaved timing, a table, a JSON file."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import hpctrain

Seconds = list[float]

WIDTH, HEIGHT = 150, 50
"""Of the page; both, since on a terminal that calls itself dumb rich takes neither alone."""


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repetitions: int = 1,
    prepare: Callable[[], object] = lambda: None,
    warm_up: int = 1,
) -> dict[str, Seconds]:
    """Time all variants, interleaved, ``rounds`` times. Collective over MPI's world.

    Args:
        variants: functions to time, by name; all ranks call them.
        rounds: number of rounds, each of which has all variants.
        repetitions: timed calls of a variant in a round.
        prepare: function that runs before each call and is not timed.
        warm_up: calls at the start of a round that are not counted.

    Returns:
        The seconds of each counted call on the slowest rank.
    """
    world = MPI.COMM_WORLD
    seconds: dict[str, Seconds] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, work in variants.items():
            for repetition in range(-warm_up, repetitions):
                prepare()
                world.Barrier()
                start = time.perf_counter()
                work()
                elapsed = world.allreduce(time.perf_counter() - start, MPI.MAX)
                if repetition >= 0:
                    seconds[name].append(elapsed)
    return seconds


def median(seconds: Seconds) -> float:
    """Return the median."""
    return statistics.median(seconds)


def machine() -> dict[str, Any]:
    """Return the description of the machine, versions and date, for the result file."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores of the machine": os.cpu_count(),
        "ranks": MPI.COMM_WORLD.size,
        "threads per rank": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split(",")[0].strip("\x00"),
        "hpctrain": hpctrain.__version__,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write machine, ratios and rows to this file")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    return parser


def report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, float],
    json_file: Path | None,
    spreads: Mapping[str, Sequence[float]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Print a table of ``rows``, then the ratios; rank 0 only.

    The JSON file also has ``spreads``: minimum and maximum of each ratio over the rounds, by name.
    ``facts`` are added to the description of the machine, or replace some of it.
    """
    if MPI.COMM_WORLD.rank != 0:
        return
    facts = {**machine(), **(facts or {})}
    console = Console(width=WIDTH, height=HEIGHT, highlight=False)
    console.print(title, style="bold")
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")
    table = Table()
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name}: {ratio:.2f}")
    if json_file:
        found = {"machine": facts, "ratios": dict(ratios), "rows": list(rows)}
        text = json.dumps(found | ({"spreads": dict(spreads)} if spreads else {}), indent=1)
        json_file.write_text(text + "\n")


def with_kept(
    results: Sequence[Mapping[str, Any]], json_file: Path, names: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Return the results of an existing file that are not measured again, then ``results``.

    Two results are of the same measurement if the values of ``names`` are equal.
    """
    kept = []
    if json_file.exists():
        new = [[each[name] for name in names] for each in results]
        old = json.loads(json_file.read_text(encoding="utf-8"))["results"]
        kept = [each for each in old if [each[name] for name in names] not in new]
    return [*kept, *results]


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
