"""Start-up: time of each stage from the process to the second step of a training script.

    python perf/bench_start.py [--ranks 4] [--nodes 1] [--rounds 5] [--json FILE]

Every launch is a new ``mpirun``. Three variants are interleaved:

* ``rule``: the plan by rule, without measurements;
* ``measured``: algorithms are measured, as in the first run on a machine;
* ``remembered``: the plan of the previous run.

The time of a stage is that of the slowest rank, the median over the launches: Python and torch,
then the start of MPI, then the stages of ``init()``, then two steps of a small model. A stage
includes its imports, from bytecode that a launch before the first round has written.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

VARIANTS = {"rule": "off", "measured": "fresh", "remembered": "auto"}
STAGES = {
    "python": "from the start of the process to its first line",
    "torch": "import torch",
    "hpctrain": "import what init() needs",
    "MPI_Init": "MPI's own: loading the library, finding the ranks",
    "ranks": "MPI communicators, hosts, cores, who lives",
    "memory": "segments that the node shares",
    "plan": "facts, and the plan by rule or of an earlier run",
    "probe": "measuring algorithms",
    "named": "the controller of named operations and its mailboxes",
    "rest": "all else in init()",
    "broadcast": "DistributedOptimizer, broadcast_parameters",
    "first step": "forward, backward, the optimizer",
    "second step": "the same again",
}
SUM = "init()"
OF_SUM = ("ranks", "memory", "plan", "probe", "named", "rest")


class Clock:
    """Clock of the stages of the start; a nested stage counts as the outer stage."""

    def __init__(self, begin: float) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last, self._is_inside = begin, False

    def note(self, stage: str) -> None:
        """Add the time since the last call of this method to ``stage``."""
        now = time.time()
        self.seconds[stage] += now - self._last
        self._last = now

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Count the time in a function as ``stage``, and the time before the call as ``ranks``."""
        function = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            if self._is_inside:
                return function(*args, **named)
            self.note("ranks")
            self._is_inside = True
            try:
                return function(*args, **named)
            finally:
                self._is_inside = False
                self.note(stage)

        setattr(owner, name, watched)


def start() -> None:
    """Run the start of a training script; rank 0 prints the seconds of the slowest rank."""
    clock = Clock(started_at())
    clock.note("python")
    import torch  # noqa: PLC0415

    clock.note("torch")
    import hpctrain as hvd  # noqa: PLC0415
    from hpctrain.comm import factory  # noqa: PLC0415
    from hpctrain.runtime import initialization  # noqa: PLC0415

    clock.note("hpctrain")
    from mpi4py import MPI  # noqa: PLC0415

    clock.note("MPI_Init")
    MPI.COMM_WORLD.Barrier()  # some ranks have come later
    clock.note("MPI_Init")
    from hpctrain.comm import build  # noqa: PLC0415

    clock.watch(build, "share_memory", "memory")
    clock.watch(factory, "decide", "plan")
    clock.watch(factory, "measured", "probe")
    clock.watch(initialization, "ProcessSets", "named")
    hvd.init()
    clock.note("rest")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    clock.note("broadcast")
    for step in ("first step", "second step"):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        clock.note(step)
    found = MPI.COMM_WORLD.gather(clock.seconds)
    if found is not None:
        slowest = {stage: max(one[stage] for one in found) for stage in STAGES}
        slowest[SUM] = max(sum(one[stage] for stage in OF_SUM) for one in found)
        print(json.dumps(slowest))  # noqa: T201 - the answer to the process that started this


def started_at() -> float:
    """Return the start time of this process, on the clock of ``time.time``."""
    with open("/proc/self/stat", encoding="ascii") as file:  # noqa: PTH123 - nothing is imported yet
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def launch(ranks: int, nodes: int, variables: dict[str, str]) -> dict[str, float]:
    """Start the ranks once and return their measurements."""
    from hpctrain.launch import mpiexec  # noqa: PLC0415 - not where ranks are timed

    line = mpiexec.command([sys.executable, __file__, "start"], num_ranks=ranks, nodes=nodes)
    environ = mpiexec.environment(os.environ | variables)
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)  # noqa: S603 - our own
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Launch all variants, interleaved, print the table, write the JSON file."""
    from measure import arguments, median, report  # noqa: PLC0415

    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each launch")
    parser.add_argument("--nodes", type=int, default=1, help="nodes to declare on this host")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as cache:
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}
        launch(options.ranks, options.nodes, compiled)
        for _ in range(options.rounds):
            for variant, probe in VARIANTS.items():
                variables = compiled | {"HPCTRAIN_PROBE": probe, "XDG_CACHE_HOME": cache}
                found[variant].append(launch(options.ranks, options.nodes, variables))
    middle = {
        variant: {stage: median([one[stage] for one in runs]) for stage in (*STAGES, SUM)}
        for variant, runs in found.items()
    }
    words = STAGES | {SUM: f"the sum of {', '.join(OF_SUM)}"}
    rows = [
        {
            "stage": stage,
            **{f"{variant} ms": middle[variant][stage] * 1e3 for variant in VARIANTS},
            "what": text,
        }
        for stage, text in words.items()
    ]
    ratios = {f"{variant}, {SUM}, s": middle[variant][SUM] for variant in VARIANTS}
    title = f"Start-up of {options.ranks} ranks on {options.nodes} node(s)"
    report(title, rows, ratios, options.json)


if __name__ == "__main__":
    start() if sys.argv[1:] == ["start"] else main()
