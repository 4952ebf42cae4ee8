"""Named operations: ours against Horovod and MPI_Allreduce, and the cost of an idle controller.

    python perf/bench_named.py [--ranks 2] [--horovod PYTHON] [--rounds 5] [--json FILE]

* ``many``: 1000 all-reduces of 4 KiB, asynchronous, submitted in another order on every rank;
* ``small``: one synchronous all-reduce of 8 bytes, in place;
* ``big``: the same of 64 MiB, in an ordinary tensor;
* ``idle``: a compute loop beside an idle controller, against the same loop before ``init()``.

Jobs of hpctrain and of Horovod take turns; Horovod is the installed one, or that of ``--horovod``,
another Python with an MPI of its own; without one it has no row. ``MPI`` is MPI_Allreduce on the
same memory in the same job, for ``many`` one blocking call after the other in one order: what a
library does that needs no names. Times are medians of the slowest rank. Ratios are the time of a
peer over ours: above 1 ours is faster. The slow-down of the idle controller is the median over
pairs of short loops, with its 95 % bounds; it needs a core for each rank. What such a median
cannot see, a look around once a second, is in the processor time that a rank takes while it does
nothing.
"""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from measure import arguments, median, report
from table import spread

from hpctrain.launch import mpiexec
from hpctrain.launch.mpirun import find_mpirun

JOB = Path(__file__).with_name("named_job.py")
MEASURED = ("many", "small", "big")
TURN_ROUNDS = 2
"""Rounds within one job."""

Found = dict[str, dict[str, list[float]]]


def launch(ranks: int, horovod: Path | None, *options: str) -> Found:
    """Start one job and return the seconds it measured."""
    python = horovod or Path(sys.executable)
    # As Horovod's documents want it: a rank's own thread and that of Horovod on any core.
    line = mpiexec.command(
        [str(python), str(JOB), "horovod.torch" if horovod else "hpctrain", *options],
        num_ranks=ranks,
        mpirun=find_mpirun(python.parent / "mpirun") if horovod else None,
        options=mpiexec.Options(binding="none" if horovod else "auto"),
    )
    environ = mpiexec.environment(os.environ)
    done = subprocess.run(line, env=environ, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - our own
    return json.loads(done.stdout.strip().splitlines()[-1])


def collect(ranks: int, horovod: Path | None, rounds: int) -> dict[str, Found]:
    """Run the jobs, interleaved; return the seconds of each package, measurement and method."""
    packages = {"hpctrain": None} | ({"Horovod": horovod} if horovod else {})
    found: dict[str, Found] = {name: {} for name in packages}
    for _ in range(rounds):
        for name, python in packages.items():
            for what, ways in launch(ranks, python, "--rounds", str(TURN_ROUNDS)).items():
                for way, seconds in ways.items():
                    found[name].setdefault(what, {}).setdefault(way, []).extend(seconds)
    return found


def slow_down(ways: dict[str, list[float]]) -> dict[str, float]:
    """Return the slow-down in percent: the median over pairs and its bounds.

    The bounds are order statistics, right for pairs of any distribution: fewer than 2.5 % of the
    draws of so many coins have so few heads.
    """
    pairs = zip(ways["with"], ways["without"], strict=True)
    percent = sorted((beside / alone - 1) * 100 for beside, alone in pairs)
    n = len(percent)
    tails = accumulate(math.comb(n, heads) / 2**n for heads in range(n))
    outside = sum(tail < 0.025 for tail in tails)
    if not outside:
        raise SystemExit(f"bounds of 95 % need 6 pairs or more, got {n}")
    return {
        "idle controller, slow-down in %": median(percent),
        "lower 95 % bound": percent[outside - 1],
        "upper 95 % bound": percent[n - outside],
        "processor time of an idle rank in %": ways["busy share"][0] * 100,
    }


def rows_of(found: dict[str, Found]) -> list[dict[str, Any]]:
    """Make a row for each measurement."""
    rows = []
    for what in MEASURED:
        row: dict[str, Any] = {"what": what}
        for name, measured in found.items():
            row[f"{name} ms"] = median(measured[what]["named"]) * 1e3
        row["MPI ms"] = median(found["hpctrain"][what]["MPI"]) * 1e3
        for peer in [name for name in row if name not in ("what", "hpctrain ms")]:
            row[f"{peer.removesuffix(' ms')} / hpctrain"] = row[peer] / row["hpctrain ms"]
        rows.append(row)
    return rows


def spreads_of(found: dict[str, Found], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the least and the most of each ratio in the rounds."""
    spreads = {}
    for what, ours in found["hpctrain"].items():
        peers = {"MPI": ours["MPI"]}
        if "Horovod" in found:
            peers["Horovod"] = found["Horovod"][what]["named"]
        for peer, seconds in peers.items():
            spreads[f"{peer} / hpctrain, {what}"] = spread(seconds, ours["named"], rounds)
    return spreads


def main() -> None:
    """Let all jobs take their turns, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each job")
    installed = Path(sys.executable) if find_spec("horovod") else None
    parser.add_argument("--horovod", type=Path, default=installed, help="another Python")
    parser.add_argument("--idle-pairs", type=int, default=300, help="pairs of the compute loop")
    options = parser.parse_args()
    found = collect(options.ranks, options.horovod, options.rounds)
    rows = rows_of(found)
    ratios = {
        f"{column}, {row['what']}": value
        for row in rows
        for column, value in row.items()
        if "/" in column
    }
    if options.ranks <= mpiexec.num_cores():
        idle = launch(options.ranks, None, "--idle-pairs", str(options.idle_pairs))["idle"]
        ratios |= slow_down(idle)
    report(
        f"Named operations, {options.ranks} ranks on one node",
        rows,
        ratios,
        options.json,
        spreads_of(found, options.rounds),
    )


if __name__ == "__main__":
    main()
