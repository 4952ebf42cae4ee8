"""Named operations: hpctrain against Horovod and MPI_Allreduce, and cost of an idle controller.

    python perf/bench_named.py [--ranks 2] [--horovod PYTHON] [--rounds 5] [--json FILE]

* ``many``: 1000 all-reduces of 4 KiB, asynchronous, submitted in another order on every rank;
* ``small``: one synchronous all-reduce of 8 bytes, in place;
* ``big``: one synchronous all-reduce of 64 MiB, in an ordinary tensor;
* ``idle``: a compute loop with an idle controller, against the same loop before ``init()``.

Jobs of hpctrain and of Horovod are interleaved. Horovod is the installed package, or the package
of another Python with its own MPI (``--horovod``); without Horovod there is no row. ``MPI`` is
MPI_Allreduce on the same memory in the same job, for ``many`` as consecutive blocking calls in one
order, which is possible without names. Times are medians of the slowest rank. Ratios are the time
of a peer over that of hpctrain: above 1 hpctrain is faster. The slow-down by the idle controller
is the median over pairs of short loops, with 95 % bounds; it needs a core for each rank. The
processor time of an idle rank also includes work that is done only once a second.
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
    """Run one job and return its measured seconds."""
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
            for what, methods in launch(ranks, python, "--rounds", str(TURN_ROUNDS)).items():
                for method, seconds in methods.items():
                    found[name].setdefault(what, {}).setdefault(method, []).extend(seconds)
    return found


def slow_down(methods: dict[str, list[float]]) -> dict[str, float]:
    """Return the slow-down in percent: the median over pairs and its bounds.

    The bounds are order statistics, valid for any distribution: by the binomial distribution, the
    median is below the lower bound with a probability of less than 2.5 %.
    """
    pairs = zip(methods["with"], methods["without"], strict=True)
    percent = sorted((beside / alone - 1) * 100 for beside, alone in pairs)
    n = len(percent)
    tails = accumulate(math.comb(n, heads) / 2**n for heads in range(n))
    outside = sum(tail < 0.025 for tail in tails)
    if not outside:
        raise SystemExit(f"bounds of 95 % must have at least 6 pairs, got {n}")
    return {
        "idle controller, slow-down in %": median(percent),
        "lower 95 % bound": percent[outside - 1],
        "upper 95 % bound": percent[n - outside],
        "processor time of an idle rank in %": methods["busy share"][0] * 100,
    }


def rows_of(found: dict[str, Found]) -> list[dict[str, Any]]:
    """Return a row of the table for each measurement."""
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
    """Return the minimum and the maximum of each ratio over the rounds."""
    spreads = {}
    for what, ours in found["hpctrain"].items():
        peers = {"MPI": ours["MPI"]}
        if "Horovod" in found:
            peers["Horovod"] = found["Horovod"][what]["named"]
        for peer, seconds in peers.items():
            spreads[f"{peer} / hpctrain, {what}"] = spread(seconds, ours["named"], rounds)
    return spreads


def main() -> None:
    """Run all jobs, interleaved, print the table, write the JSON file."""
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
