"""The models of ``hpctrain.cost`` against measured sums, on a virtual cluster.

    python perf/bench_cost.py [--quick] [--rates 1gbit 200mbit] [--json FOLDER [--more]]

Nodes are namespaces of this machine, as in ``bench_network.py``. All points of a rate are stored
in one file, from which ``hpctrain bench fit`` computes the description of a machine. The program
prints the errors of the models on points that were not used by the fit: half of them, drawn at
random. The time of a point is the minimum over rounds and over runs (``--more``), because other
load of the machine only increases the time.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the cluster belongs to the tests

from hpctrain.core.units import KIB, MIB
from hpctrain.cost.fitting import Point, fit, read_points, write_points
from tests.cluster.vcluster import VirtualCluster

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((2, 2), (4, 2), (2, 4))
"""Nodes, and ranks of each."""
SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


def measure(nodes: int, ranks: int, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Build a cluster, run the job and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "points.json"
        words = ["python", str(ROOT / "perf/cost_job.py"), "--json", str(file)]
        words += ["--rounds", str(options.rounds), "--sizes", *map(str, options.sizes)]
        with VirtualCluster(nodes=nodes, rate=rate) as cluster:
            done = cluster.run(
                words,
                ranks_per_node=[ranks] * nodes,
                mpi=options.mpi,
                env={"HPCTRAIN_PROBE": "off"},
                timeout_s=options.timeout,
            )
        if done.returncode:
            raise SystemExit(f"{nodes} x {ranks}, {rate}: {done.stdout}{done.stderr}")
        read: list[Point] = read_points(file)
        return {"machine": json.loads(file.read_text())["machine"], "points": read}


def least(points: list[Point]) -> list[Point]:
    """Return each point once, with its minimum time over all measurements."""
    best: dict[Point, float] = {}
    for point in points:
        key = replace(point, seconds=1.0)
        best[key] = min(best.get(key, point.seconds), point.seconds)
    return [replace(point, seconds=seconds) for point, seconds in best.items()]


def main() -> None:
    """Run all jobs; print the errors of the models and write the points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small messages, for a test of the program"
    )
    parser.add_argument("--mpi", default="openmpi", choices=("openmpi", "mpich"))
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="of the links")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each algorithm")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a job may take")
    parser.add_argument("--json", type=Path, help="folder for the files cost-RATE.json")
    parser.add_argument("--more", action="store_true", help="keep what those files have if less")
    options = parser.parse_args()
    if options.quick:
        options.sizes = SIZES[:2]
    console = Console()
    for rate in options.rates:
        found = [measure(nodes, ranks, rate, options) for nodes, ranks in SHAPES]
        file = (options.json or Path()) / f"cost-{rate}.json"
        old = read_points(file) if options.more else []
        points = least([*old, *(point for each in found for point in each["points"])])
        console.print(f"{rate}: median error {fit(points).held_out:.1%} on points not fitted to")
        if options.json:
            write_points(file, points, machine=found[-1]["machine"], rate=rate)


if __name__ == "__main__":
    main()
