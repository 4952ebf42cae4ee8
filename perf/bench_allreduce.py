"""All-reduce inside one node: hpctrain against MPI libraries, gloo, Horovod and DeepSpeed.

    python perf/bench_allreduce.py [--ranks 2] [--peers all] [--json FILE]

Sums of float32 values of all ranks, in place, on every rank:

* ``bucket``: hpctrain, on a bucket in node memory, which stores gradients;
* ``tensor``: hpctrain, on an ordinary tensor;
* ``Open MPI``, ``MPICH``, ``Intel MPI``: MPI_Allreduce of the library;
* ``gloo``: torch.distributed over gloo;
* ``Horovod``: over Open MPI;
* ``DeepSpeed``: its all-reduce in shared memory for inference.

Each peer runs in separate processes, some in a separate environment, which ``make .venv-mpich
.venv-impi .venv-trainers`` creates; a missing peer is left out with a message. The jobs run in
short blocks, interleaved, and sleep during the blocks of other jobs. Before each timed call the
values are written again, outside of the measured time; the time of a call is that of its slowest
rank. Ratios are the median time of the fastest peer over that of hpctrain: above 1 hpctrain is
faster. Sums are compared with the exact sum.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from measure import Seconds, arguments, median, report
from rich.console import Console
from rich.progress import track
from table import spread

import hpctrain
from hpctrain.core.units import KIB, MIB, format_bytes

JOB = Path(__file__).with_name("allreduce_job.py")
ROOT = JOB.parents[1]
SIZES = (8, KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
OURS = ("bucket", "tensor")
ENVIRONMENTS = {"MPICH": ".venv-mpich", "Intel MPI": ".venv-impi", "DeepSpeed": ".venv-trainers"}
PEERS = ("Open MPI", "MPICH", "Intel MPI", "gloo", "Horovod", "DeepSpeed")
START_LIMIT_S, BLOCK_LIMIT_S = 180, 120  # DeepSpeed compiles its kernel at the first start


class Job:
    """Ranks of one peer, which wait for requests."""

    def __init__(self, peer: str, ranks: int, folder: Path) -> None:
        self.peer = peer
        self.ranks = ranks
        self.methods: list[str] = []
        self.version = ""
        found = ENVIRONMENTS.get(peer)
        python = ROOT / found / "bin/python" if found else Path(sys.executable)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / peer))
        self._listener.listen(ranks)
        self._log = (folder / f"{peer}.log").open("w+b")
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        line = [python, "-m", "hpctrain", "launch", "-n", str(ranks), "--"]
        self._process = subprocess.Popen(  # noqa: S603 - our own
            [*line, python, JOB, peer, folder / peer],
            env={**os.environ, "PATH": path},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._streams: list[Any] = []

    def connect(self) -> None:
        """Wait for the ranks. Raises ``OSError`` if they do not start."""
        self._listener.settimeout(1)
        for _ in range(START_LIMIT_S):
            if len(self._streams) == self.ranks or self._process.poll() is not None:
                break
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(BLOCK_LIMIT_S)
            self._streams.append(connection.makefile("rw"))
        if len(self._streams) < self.ranks:
            raise OSError(f"its ranks did not connect: {self.output()}")
        for stream in self._streams:
            _, self.methods, self.version = json.loads(stream.readline())

    def seconds(self, method: str, num_bytes: int, repetitions: int) -> Seconds:
        """Return the times of a block of calls."""
        for stream in self._streams:
            print(json.dumps([method, num_bytes, repetitions]), file=stream, flush=True)
        replies = [stream.readline() for stream in self._streams]
        if not all(replies):
            raise OSError(self.output())
        [times] = json.loads(replies[0])
        return times

    def output(self) -> str:
        """Return the end of what the job printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()
        self._listener.close()
        try:
            self._process.wait(20 if self._streams else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._log.close()


def missing(peer: str) -> str:
    """Return why a peer cannot be measured; empty if it can."""
    found = ENVIRONMENTS.get(peer)
    if found and not (ROOT / found / "bin/python").exists():
        return f"no environment {found}"
    return ""


def measure_size(num_bytes: int, rounds: int, jobs: list[Job]) -> dict[str, Seconds]:
    """Return the seconds of each method, whose blocks are interleaved."""
    repetitions = 3 if num_bytes >= 16 * MIB else 20
    found: dict[str, Seconds] = {}
    for _ in range(rounds):
        for job in jobs:
            for method in job.methods:
                found.setdefault(method, []).extend(job.seconds(method, num_bytes, repetitions))
    return found


def row_of(num_bytes: int, seconds: dict[str, Seconds]) -> dict[str, Any]:
    """Return medians and ratios of one size."""
    middle = {name: median(times) for name, times in seconds.items()}
    best = min(middle.keys() - OURS, key=middle.__getitem__)
    return {
        "size": format_bytes(num_bytes),
        **{f"{name} us": second * 1e6 for name, second in middle.items()},
        "fastest peer": best,
        **{f"fastest peer / {name}": middle[best] / middle[name] for name in OURS},
    }


def main() -> None:
    """Measure every size, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--peers", nargs="+", choices=["all", *PEERS], default=["Open MPI", "gloo", "Horovod"],
        help="peers to compare with; without this option, those that .venv contains",
    )  # fmt: skip
    options = parser.parse_args()
    notes = Console(stderr=True, markup=False)
    wanted = PEERS if "all" in options.peers else options.peers
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = []
        for peer in ("hpctrain", *wanted):
            if reason := missing(peer):
                notes.print(f"{peer} is not measured: {reason}")
            else:
                started.append(stack.enter_context(Job(peer, options.ranks, folder)))
        jobs = []
        for job in started:
            try:
                job.connect()
                jobs.append(job)
            except OSError as error:
                notes.print(f"{job.peer} is not measured: {error}")
        if [job.peer for job in jobs[:1]] != ["hpctrain"] or len(jobs) == 1:
            raise SystemExit("hpctrain and at least one peer must start")
        rows, spreads, ratios = [], {}, {}
        for num_bytes in track(SIZES, "sizes", transient=True):
            seconds = measure_size(num_bytes, options.rounds, jobs)
            rows.append(row := row_of(num_bytes, seconds))
            for name in OURS:
                ratio = f"fastest peer / {name}, {row['size']}"
                ratios[ratio] = row[f"fastest peer / {name}"]
                peer = seconds[row["fastest peer"]]
                spreads[ratio] = spread(peer, seconds[name], options.rounds)
        facts = {
            "ranks": options.ranks,
            "threads per rank": 1,
            **{job.peer: job.version for job in jobs[1:]},
        }
        title = f"All-reduce, {options.ranks} ranks on one node, hpctrain {hpctrain.__version__}"
        report(title, rows, ratios, options.json, spreads, facts)


if __name__ == "__main__":
    main()
