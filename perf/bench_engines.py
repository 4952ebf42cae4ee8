"""Engines: hpctrain against Horovod, all-reduces by size and the training step, for each world.

    python perf/bench_engines.py [--quick] [--worlds 2 4 1gbit 200mbit] [--json FILE]

Each method has its own job, because a process has one engine; the jobs are interleaved, so that
each round has one job of each method:

* ``hpctrain``: on its own engine, with the plan that it measures at its start;
* ``Horovod``: with its own API and its defaults;
* ``Horovod, cycle 0.1 ms``: the same with ``HOROVOD_CYCLE_TIME=0.1``, because the default of
  1 ms is most of the time of a small sum;
* ``on Horovod, flat`` and ``on Horovod, two-level``: hpctrain with ``engine="horovod"``; two
  levels need several nodes;
* ``no communication``: the training step only, the faster of its plain and its flat form;
* only if selected by name, and only the training step: ``hpctrain, shard=node``, ``torch DDP,
  gloo`` and ``plain MPI``, a sum for each gradient after backward.

All jobs have the same launcher, one torch thread per rank, and no binding, because Horovod works
in a separate thread. A sum is one synchronous ``allreduce_`` of an ordinary float32 tensor; the
step is that of ``bench_step.py``, with the ``DistributedOptimizer`` of each package. Every job
checks its sums and the weights after a step. Links between nodes are the same as in
``bench_network.py``. Times are those of the slowest rank, medians over the rounds of the median in
a round. Ratios are the time of a method over that of ``hpctrain``: above 1 hpctrain is faster.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines_table import rows_of, show, step_ratios
from measure import median, with_kept
from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the cluster belongs to the tests

from hpctrain.core.units import KIB, MIB
from hpctrain.launch import mpiexec
from tests.cluster.vcluster import VirtualCluster
from tests.cluster.vcluster.check import obstacle

JOB = Path(__file__).resolve().with_name("engines_job.py")
SIZES = tuple(1 << power for power in range(3, 27))
"""8 B to 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Ranks, and the links between their nodes if there are several."""

    title: str
    ranks_per_node: tuple[int, ...]
    rate: str | None = None
    job: tuple[str, ...] = ("--steps", "6", "--warm-up", "2", "--most-bytes", str(192 * MIB))
    """How much a job does in one turn."""


_SLOW = ("--steps", "2", "--warm-up", "1", "--most-bytes", str(4 * MIB))

WORLDS = {
    "2": World(title="2 ranks on one node", ranks_per_node=(2,)),
    "4": World(title="4 ranks on one node", ranks_per_node=(4,)),
    "1gbit": World(
        title="2 nodes x 2 ranks, 1 Gbit/s", ranks_per_node=(2, 2), rate="1gbit", job=_SLOW
    ),
    "4x2": World(
        title="4 nodes x 2 ranks, 1 Gbit/s", ranks_per_node=(2, 2, 2, 2), rate="1gbit", job=_SLOW
    ),
    "200mbit": World(
        title="2 nodes x 2 ranks, 200 Mbit/s", ranks_per_node=(2, 2), rate="200mbit", job=_SLOW
    ),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """Method of a job: the command line of the ranks, and their environment."""

    package: str
    engine: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    several_nodes: bool = False
    """Whether it needs them."""
    words: tuple[str, ...] = ()
    """Further arguments of its job."""
    is_usual: bool = True
    """Whether it is measured if no methods are named."""


METHODS = {
    "hpctrain": Method(package="hpctrain", engine="hpctrain"),
    "Horovod": Method(package="horovod.torch"),
    "Horovod, cycle 0.1 ms": Method(
        package="horovod.torch", environ={"HOROVOD_CYCLE_TIME": "0.1"}
    ),
    "on Horovod, flat": Method(
        package="hpctrain", engine="horovod", words=("--algorithm", "flat")
    ),
    "on Horovod, two-level": Method(
        package="hpctrain",
        engine="horovod",
        words=("--algorithm", "two-level"),
        several_nodes=True,
    ),
    "no communication": Method(package="none"),
    "hpctrain, shard=node": Method(
        package="hpctrain", engine="hpctrain", words=("--shard", "node"), is_usual=False
    ),
    "torch DDP, gloo": Method(
        package="ddp", environ={"GLOO_SOCKET_IFNAME": "eth0"}, several_nodes=True, is_usual=False
    ),
    "plain MPI": Method(package="mpi", is_usual=False),
}


def launch(world: World, words: Sequence[str], environ: Mapping[str, str], limit_s: float) -> None:
    """Run one job to its end; show its output if it fails."""
    if world.rate:
        with VirtualCluster(nodes=len(world.ranks_per_node), rate=world.rate) as cluster:
            try:
                done: Any = cluster.run(
                    ["python", *words],
                    ranks_per_node=world.ranks_per_node,
                    env=environ,
                    timeout_s=limit_s,
                )
            except TimeoutError as error:
                raise SystemExit(f"{world.title}: {words}: {error}") from None
    else:
        line = mpiexec.command(
            [sys.executable, *words],
            num_ranks=sum(world.ranks_per_node),
            options=mpiexec.Options(binding="none"),
        )
        full = mpiexec.environment(os.environ) | dict(environ)
        done = subprocess.run(line, env=full, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode:
        raise SystemExit(
            f"{world.title}: {words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )


def turn(world: World, method: Method, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job of a method once, and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = [str(JOB), method.package, *method.words, *world.job, "--json", str(file)]
        words += ["--sizes", *map(str, options.sizes)]
        if method.engine:
            words += ["--engine", method.engine]
        # A separate cache: each job measures its own plan, and no job uses that of another.
        environ = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": folder, **method.environ}
        launch(world, words, environ, options.timeout)
        return json.loads(file.read_text(encoding="utf-8"))


def measure(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Run the jobs of all methods, interleaved.

    Returns:
        A dictionary; its key ``ways`` has for each method the medians over the rounds: ``sums`` by
        size, and ``steps``.
    """
    methods = {
        name: method
        for name, method in METHODS.items()
        if name in options.methods and (world.rate or not method.several_nodes)
    }
    found: dict[str, Any] = {name: {"sums": {}, "steps": []} for name in methods}
    about: dict[str, Any] = {}
    for _ in range(options.rounds):
        for name, method in methods.items():
            figures = turn(world, method, options)
            for size, seconds in figures["sums"].items():
                found[name]["sums"].setdefault(int(size), []).append(median(seconds))
            found[name]["steps"].append(min(map(median, figures["steps"].values())))
            found[name].setdefault("exposed", []).append(figures["exposed"])
            if "plan" in figures:
                found[name]["plan"] = figures["plan"]
            about |= {"machine": figures["machine"]} if method.package != "none" else {}
            about |= {"horovod": figures["horovod"]} if "horovod" in figures else {}
    return {"world": world.title, **about, "ways": found}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="two worlds, for a test of the program"
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, help="by default all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each method")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a job on nodes")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.worlds = options.worlds or ["2", "1gbit"]
        options.sizes, options.rounds = (8, 64 * KIB, MIB), 1
    options.worlds = options.worlds or [name for name in WORLDS if name != "4x2"]
    options.methods = options.methods or [
        name for name, method in METHODS.items() if method.is_usual
    ]
    return options


def main() -> None:
    """Measure all worlds; print and write the results."""
    options = arguments()
    if importlib.util.find_spec("horovod") is None:
        raise SystemExit("Horovod is not installed here: hpctrain horovod build")
    console = Console(width=150, height=50, highlight=False)
    results = []
    for world in map(WORLDS.__getitem__, options.worlds):
        if world.rate and (reason := obstacle()):
            console.print(f"{world.title}: left out, {reason}")
            continue
        results.append(measure(world, options))
        show(console, results[-1])
    if options.json:
        written = with_kept(results, options.json, ("world",))
        summary = [
            {"world": r["world"], "ratios": step_ratios(r), "rows": rows_of(r)} for r in written
        ]
        text = json.dumps({"summary": summary, "results": written}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
