"""Checks that need a GPU, in one command of about ten minutes.

    python perf/gpu_check.py [--only PHASE ...] [--out FILE]

Each phase runs in separate processes and has a time limit and a verdict; other phases continue
after a phase that fails or hangs. The package need not be installed; PYTHONPATH is sufficient,
with torch 2.11 or later. All ranks share one GPU. The exit code is 1 if a phase has failed.

Without a GPU all phases are skipped. With ``MCPU_SITE``, the folder of a simulated device
(torch_mcpu), the phases that it supports run on that device.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_finding import Finding, findings_in
from rich.console import Console
from rich.table import Table

from hpctrain.launch.supervise import TIMED_OUT

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MARK_OF_END = "gpu-check-ends: "
"""Stands before the time at which a rank of ``gpu_job.py`` fails on purpose."""
MOST_TO_END_S = 30.0
MPS = "nvidia-cuda-mps-control"
TAIL = 3000  # characters of the output of a phase that failed


@dataclass(frozen=True)
class Part:
    """One launch of a phase."""

    words: str  # the script and its arguments
    ranks: int = 1
    nodes: int = 1  # declared ones
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment
    by_mps: bool = False  # whether kernels of several ranks run at once, else they take turns
    judge: Callable[["Ended"], Finding] | None = None  # by default the ranks' own finding

    def __str__(self) -> str:
        """Return the name of the part, with ranks and variables."""
        nodes = f" on {self.nodes} nodes" * (self.nodes > 1)
        mps = ["by MPS"] * self.by_mps
        words = [self.words, f"{self.ranks} ranks{nodes}", *self.variables.values(), *mps]
        return " ".join(words)


@dataclass(frozen=True)
class Phase:
    """Checks with a common verdict."""

    passes_if: str
    limit_s: float
    parts: Sequence[Part]
    needs_cuda: bool = False


@dataclass(frozen=True)
class Ended:
    """Result of a launch that has ended."""

    code: int
    output: str
    seconds: float
    at: float  # the time of its end


def ends(ended: Ended) -> Finding:
    """Check that all ranks ended soon after a failed rank, and that the output names this rank."""
    times = re.findall(rf"^{MARK_OF_END}(\S+)$", ended.output, re.MULTILINE)
    if not times:
        return own_finding(ended)
    delay_s = ended.at - float(times[-1])
    is_named = bool(re.search(r"\brank 1\b", ended.output.partition(MARK_OF_END)[2]))
    figures = {"seconds": round(delay_s, 1), "exit code": ended.code, "rank is named": is_named}
    if ended.code == 0 or not is_named or delay_s > MOST_TO_END_S:
        figures["output"] = ended.output[-TAIL:]
        return Finding(
            "fail", "a rank continued, or the output does not name the failed rank", figures
        )
    return Finding("pass", f"all ended in {delay_s:.1f} s", figures)


def planted(ended: Ended) -> Finding:
    """Return the last finding of ranks with a planted fault, which may also end the ranks."""
    found = findings_in(ended.output)
    return found[-1] if found else own_finding(ended)


HOST, PEERS = {"HPCTRAIN_DEVICE_SUMS": "host"}, {"HPCTRAIN_DEVICE_SUMS": "auto"}
"""Methods that sum gradients of a node: on the host, or on GPUs with access to each other."""
NCCL = {
    "HPCTRAIN_DEVICE_SUMS": "nccl",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # from NCCL 2.30 on; earlier versions reject shared GPUs
    "CARDS": "own",
}
"""NCCL sums; each rank has its own GPU if there are enough."""


PHASES: Mapping[str, Phase] = {
    "facts": Phase(
        "node memory can be registered; memory and events are shared by two processes",
        40,
        (Part("gpu_facts.py card"), Part("gpu_facts.py between", 2)),
        needs_cuda=True,
    ),
    "sums": Phase(
        "the kernel that sums the buckets of ranks is bitwise equal to operations of torch",
        60,
        (Part("gpu_facts.py sums"),),
        needs_cuda=True,
    ),
    "ceilings": Phase(
        "copies of registered node memory have 95 % of the rate of pinned memory",
        60,
        (Part("gpu_facts.py copies", 4),),
        needs_cuda=True,
    ),
    "bits": Phase(
        "averages and sums of all dtypes are bitwise equal to those of the CPU",
        100,
        (
            Part("gpu_job.py bits", 2, variables=HOST),
            Part("gpu_job.py bits", 2, variables=PEERS),
            Part("gpu_job.py bits", 4, variables=PEERS),
            Part("gpu_job.py bits", 4, nodes=2, variables=PEERS),
        ),
    ),
    "order": Phase(
        "with late streams right in 20 of 20 runs; with each planted fault not",
        120,
        (
            *(Part("gpu_job.py order", 2, variables=each) for each in (HOST, PEERS)),
            Part("gpu_job.py order sides", 2, variables=PEERS),
            *(
                Part(f"gpu_job.py order {plant}", 2, variables=HOST, judge=planted)
                for plant in ("caller", "copies", "host")
            ),
            Part("gpu_job.py order caller", 2, variables=PEERS, judge=planted),
        ),
    ),
    "programs": Phase(
        "random scripts train as plain torch does, with any changes of gradients",
        150,
        tuple(Part("gpu_programs.py", 2, variables=each) for each in (PEERS, HOST)),
    ),
    "nccl": Phase(
        "sums of NCCL are near those of the CPU; late streams, a lost rank; the host never waits",
        120,
        (
            *(
                Part(f"gpu_job.py {words}", 2, variables=NCCL, judge=judge)
                for words, judge in (
                    ("near", None),
                    ("lost", planted),
                    ("order", None),
                    ("order sums", planted),
                    ("order caller", planted),
                    ("waits", None),
                    ("death", ends),
                )
            ),
            Part("gpu_step.py", 2, variables=NCCL, by_mps=True),
        ),
        needs_cuda=True,
    ),
    "waits": Phase(
        "the host does not wait for the GPU within backward",
        60,
        tuple(Part("gpu_job.py waits", 2, variables=each) for each in (HOST, PEERS)),
    ),
    "step": Phase(
        "hooks cost less than 2 % of a step of 350 M parameters; 70 % of communication is hidden",
        150,
        (
            Part("gpu_step.py", 2, variables=PEERS, by_mps=True),
            Part("gpu_step.py", 2, variables=HOST, by_mps=True),
            Part("gpu_step.py", 2, variables=PEERS),
        ),
    ),
    "ends": Phase(
        "if a rank dies or has no memory left, all ranks end within 30 s, and name this rank",
        90,
        (
            Part("gpu_job.py death", 2, judge=ends),
            Part("gpu_job.py memory", 2, judge=ends),
        ),
    ),
}


def main() -> int:
    """Run the phases, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PHASES, help="phases; by default all")
    parser.add_argument("--out", type=Path, help="default: perf/results/gpu-CARD.json")
    options = parser.parse_args()
    device = find_device()
    facts, found = machine(device), dict[str, Finding]()
    file = options.out or RESULTS / f"gpu-{short(facts['card'])}.json"
    for name in options.only or PHASES:
        start = time.perf_counter()
        found[name] = run_phase(PHASES[name], device)
        seconds = time.perf_counter() - start
        sys.stderr.write(f"{name}: {found[name].verdict} in {seconds:.0f} s\n")
        if device == "cuda" or options.out:  # after each phase, because the time on a GPU may end
            phases = {name: asdict(finding) for name, finding in found.items()}
            file.write_text(json.dumps({"machine": facts, "phases": phases}, indent=1) + "\n")
    write_table(facts, found)
    return int(any(finding.verdict == "fail" for finding in found.values()))


def find_device() -> str:
    """Return the kind of device, ``cuda`` or ``mcpu``; empty without a device."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("DEV") == "cpu":  # to try this program itself
        return "cpu"
    return "mcpu" if os.environ.get("MCPU_SITE") else ""


def machine(device: str) -> dict[str, Any]:
    """Return the description of the machine and the versions, for the result file."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "card": torch.cuda.get_device_name() if device == "cuda" else device or "none",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


def short(card: str) -> str:
    """Return a name for the result file."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")


def run_phase(phase: Phase, device: str) -> Finding:
    """Run the parts of a phase within its limit; return their combined finding."""
    if not device:
        return Finding(
            "skip", "this machine has no GPU, and MCPU_SITE selects no simulated device"
        )
    if phase.needs_cuda and device != "cuda":
        return Finding("skip", "the phase needs a GPU, but this machine has none")
    end = time.monotonic() + phase.limit_s
    found: dict[str, Finding] = {}
    for part in phase.parts:
        left_s = end - time.monotonic()
        name = str(part)
        if left_s < 1:
            found[name] = Finding(
                "fail", f"the limit of {phase.limit_s:g} s was reached before this part"
            )
            continue
        around: Any = multi_process_service() if part.by_mps else nullcontext({})
        with around as service:
            ended = None if service is None else launch(part, device, left_s, service)
        if ended is None:
            found[name] = Finding("skip", f"{MPS} is not installed, or does not start")
            continue
        found[name] = (part.judge or own_finding)(ended)
    return together(found)


def together(found: Mapping[str, Finding]) -> Finding:
    """Combine the findings of several launches: the worst verdict, all reasons."""
    verdicts = [finding.verdict for finding in found.values()]
    worst = next((verdict for verdict in ("fail", "pass") if verdict in verdicts), "skip")
    reasons = [f"{name}: {f.reason}" for name, f in found.items() if f.reason]
    return Finding(worst, "\n".join(reasons), {name: f.figures for name, f in found.items()})


def own_finding(ended: Ended) -> Finding:
    """Return the finding that the ranks printed, or a failure without one."""
    found = findings_in(ended.output)
    worst = next((finding for finding in found if finding.verdict == "fail"), None)
    if worst is not None or (found and ended.code == 0):
        return worst or found[-1]
    why = "time limit reached" if ended.code == TIMED_OUT else f"exit code {ended.code}"
    return Finding("fail", f"{why} after {ended.seconds:.0f} s", {"output": ended.output[-TAIL:]})


@contextmanager
def multi_process_service() -> Iterator[dict[str, str] | None]:
    """Run the MPS service, with which kernels of several processes run concurrently.

    Yields:
        The variables that processes need to use the service; None if it is not available.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = partial(
            subprocess.run, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        program = shutil.which(MPS)
        if program is None or control([program, "-d"], timeout=10).returncode:
            yield None
            return
        try:
            yield variables
        finally:
            control([program], input="quit\n", timeout=20)


def launch(part: Part, device: str, limit_s: float, service: Mapping[str, str]) -> Ended:
    """Start the ranks of a part and wait for their end."""
    script, *words = part.words.split()
    line = [sys.executable, str(HERE / script), *words]
    if part.ranks > 1:
        options = ["-n", str(part.ranks), "--no-bind", "--timeout", str(max(1, round(limit_s)))]
        options += ["--nodes", str(part.nodes)] * (part.nodes > 1)
        line = [sys.executable, "-m", "hpctrain", "launch", *options, "--", *line]
    environ = os.environ | {"DEV": device, "PYTHONUNBUFFERED": "1"} | part.variables | service
    start = time.perf_counter()
    try:
        done = subprocess.run(  # noqa: S603 - our own
            line,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=limit_s + 15,  # the launcher keeps the limit, and ends the ranks
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return Ended(TIMED_OUT, text, time.perf_counter() - start, time.time())
    return Ended(done.returncode, done.stdout, time.perf_counter() - start, time.time())


def write_table(facts: Mapping[str, Any], found: Mapping[str, Finding]) -> None:
    """Print a row for each phase, and its figures below."""
    console = Console(width=150, height=50, highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")
    table = Table("phase", "verdict", "passes if", "reason", show_lines=True)
    for name, finding in found.items():
        table.add_row(name, finding.verdict, PHASES[name].passes_if, finding.reason)
    console.print(table)
    for name, finding in found.items():
        for part, figures in finding.figures.items():
            if figures:
                console.print(f"{name}: {part}", style="bold")
                write_figures(console, figures)


def write_figures(console: Console, figures: Mapping[str, Any]) -> None:
    """Print figures, and rows as a table."""
    for name, value in figures.items():
        if name == "rows" and value:
            table = Table(*(str(column) for column in value[0]))
            for row in value:
                table.add_row(*map(str, row.values()))
            console.print(table)
        else:
            console.print(f"  {name}: {value}", markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
