"""Start-up: from ``hpctrain.init()`` to the end of the first collective, after the imports.

    python perf/bench_start.py [--ranks 4] [--nodes 1] [--rounds 5] [--json FILE]

Every launch is a new one of ``mpirun``. Three ways in turn:

* ``rule``: the plan by rule, nothing is measured;
* ``measured``: algorithms are measured, as in the first run on a machine;
* ``remembered``: the plan of the run before.

A figure is that of the slowest rank; the median over the launches counts.
"""

import os
import subprocess
import sys
import tempfile
import time

import torch
from measure import arguments, median, report

from hpctrain.launch import mpiexec

WAYS = {"rule": "off", "measured": "fresh", "remembered": "auto"}


def start() -> None:
    """Join the world and sum a tensor; rank 0 prints the seconds of the slowest rank."""
    from mpi4py import MPI  # noqa: PLC0415 - only where ranks are started

    import hpctrain  # noqa: PLC0415
    import hpctrain.collectives.allreduce  # noqa: PLC0415
    import hpctrain.comm.build  # noqa: PLC0415
    import hpctrain.comm.plan.probe  # noqa: PLC0415

    tensor = torch.ones(10)
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    hpctrain.init()
    hpctrain.allreduce(tensor)
    seconds = MPI.COMM_WORLD.reduce(time.perf_counter() - begin, MPI.MAX)
    if seconds is not None:
        print(seconds)  # noqa: T201 - the answer to the process that started this


def launch(ranks: int, nodes: int, environ: dict[str, str]) -> float:
    """Start the ranks once and return what they measured."""
    line = mpiexec.command([sys.executable, __file__, "start"], num_ranks=ranks, nodes=nodes)
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)  # noqa: S603 - our own
    return float(done.stdout.split()[-1])


def main() -> None:
    """Launch every way in turn, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each launch")
    parser.add_argument("--nodes", type=int, default=1, help="nodes to declare on this host")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(options.rounds):
            for way, probe in WAYS.items():
                told = {"HPCTRAIN_PROBE": probe, "XDG_CACHE_HOME": cache}
                environ = mpiexec.environment(os.environ | told)
                seconds[way].append(launch(options.ranks, options.nodes, environ))
    rows = [
        {"plan": way, "median s": median(found), "fastest s": min(found), "slowest s": max(found)}
        for way, found in seconds.items()
    ]
    title = f"Start-up of {options.ranks} ranks on {options.nodes} node(s)"
    report(title, rows, {f"{row['plan']}, s": row["median s"] for row in rows}, options.json)


if __name__ == "__main__":
    start() if sys.argv[1:] == ["start"] else main()
