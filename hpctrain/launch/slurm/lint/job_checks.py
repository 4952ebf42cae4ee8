"""Checks of what a batch script asks Slurm for: tasks, GPUs, time, signals, requeues."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from signal import Signals
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_seconds, parse_seconds
from hpctrain.launch.slurm.lint.script import BatchScript, number
from hpctrain.launch.slurm.lint.shell import UNKNOWN, Command
from hpctrain.launch.slurm.scheduler import UNLIMITED, time_limit_s

DEFAULT_EVERY = "10min"
"""``checkpoint.every`` of a run that does not say it."""

_COUNTS = re.compile(
    r"(restart|requeue|attempt|retr|tries|count|round)\w*\W{0,6}\w*\W{0,3}"
    r"(-lt|-le|-gt|-ge|-eq|-ne|[<>=!]=?)",
    re.IGNORECASE,
)
"""A comparison of something that counts."""

_PLACES = ("-N", "--map-by", "-map-by", "-npernode", "--npernode", "-ppn", "-perhost", "-ppr")
"""Options of mpirun that say how many ranks a node gets."""

_NUM_RANKS = ("-n", "-np", "--np", "--ranks", "-c")
"""Options of mpirun that say how many ranks there are."""

_BY_GPU = ("ntasks-per-gpu", "gpus-per-task", "ntasks-per-socket", "gpus-per-socket")


def check_header(script: BatchScript) -> Iterator[Finding]:
    """Find what sbatch refuses or does not read."""
    if not script.text.startswith("#!"):
        what = "the first line must name the shell, sbatch refuses a script without it"
        yield Finding("script", "error", what, "begin with #!/bin/bash")
    if "\r\n" in script.text:
        what = "lines end as in DOS, sbatch refuses such a script"
        yield Finding("script", "error", what, "sed -i 's/\\r$//' SCRIPT")
    for line in script.late:
        what = f"line {line}: #SBATCH behind the first command: sbatch does not read it"
        yield Finding("script", "warning", what, "move it to the top")
    for name, value in script.options.items():
        if re.search(r"\$\w|\$\{", value):
            what = f"#SBATCH --{name}={value}: sbatch expands no variables"
            do = "write the value itself, or give it on the command line: "
            yield Finding("script", "warning", what, f'{do}sbatch --{name}="..." SCRIPT')


def check_gpus(script: BatchScript) -> Iterator[Finding]:
    """Find more or fewer ranks on a node than it has GPUs for them."""
    gpus, tasks = _gpus_per_node(script), _tasks_per_node(script)
    if not gpus or not tasks or gpus == tasks:
        return
    do = f"#SBATCH --ntasks-per-node={gpus}"
    if tasks > gpus:
        what = f"{tasks} ranks on a node share {gpus} GPU{'s' * (gpus != 1)}, each needs its own"
        do += f", or --gpus-per-node={tasks}"
    else:
        idle = gpus - tasks
        what = (
            f"{tasks} rank{'s' * (tasks != 1)} on a node of {gpus} GPUs: a rank uses one, so "
            f"{idle} would be idle"
        )
    yield Finding("tasks and GPUs", "warning", what, do)


def check_tasks(script: BatchScript) -> Iterator[Finding]:
    """Find a number of tasks that Slurm may spread over the nodes as it likes."""
    tasks, nodes = script.number("ntasks"), script.number("nodes")
    spread = {"ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "distribution"}
    steps = script.rank_steps
    if tasks in (None, 1) or nodes == 1 or not (steps or script.launchers):
        return
    if spread & {*script.options} or (
        steps and all({*spread, "nodes"} & {*step.options} for step in steps)
    ):
        return
    even = "--nodes=N --ntasks-per-node=M"
    if tasks and nodes and tasks % nodes == 0:
        even = f"--nodes={nodes} --ntasks-per-node={tasks // nodes}"
    yield Finding(
        "tasks per node",
        "warning",
        f"--ntasks={tasks} without --ntasks-per-node: Slurm fills one node after the other, and "
        "the last one has fewer ranks",
        f"#SBATCH {even}",
    )


def check_signal(script: BatchScript) -> Iterator[Finding]:
    """Find a job that is to go on later and is not told to save its state."""
    said = script.options.get("signal")
    if said is None and script.is_requeued:
        yield Finding(
            "signal",
            "warning",
            "the job may be queued again, but no --signal tells the run to save its state before",
            "#SBATCH --signal=USR1@120",
        )
    if said is None or not re.match(r"R?B", said) or script.shell.has_unread_sources:
        return
    traps = [command.words for command in script.commands if command.name == "trap"]
    handled = {_signal(word or "") for words in traps for word in words[2:]}
    is_replaced = re.search(r"^\s*exec\s+\w*run\b", script.text, re.MULTILINE)
    is_known = not is_replaced and not any(None in words for words in traps)
    if is_known and _signal(re.sub(r"^\w*:|@.*$", "", said)) not in handled:
        yield Finding(
            "signal",
            "warning",
            f"--signal={said} goes to the batch shell alone, which has no trap for it and ends "
            "by it",
            "#SBATCH --signal=USR1@120 reaches the ranks; or a trap that hands it on",
        )


def check_output(script: BatchScript) -> Iterator[Finding]:
    """Find an output that has no folder, or that a second run of the job would empty."""
    if script.is_requeued and not script.options.get("open-mode", "").lower().startswith("a"):
        yield Finding(
            "output",
            "warning",
            "the job may be queued again, and without --open-mode=append each run empties the "
            "output of those before",
            "#SBATCH --open-mode=append",
        )
    facts = script.facts
    for name in ("output", "error") if facts.directory is not None else ():
        folder = Path(script.options.get(name, "")).parent
        is_plain = not re.search(r"[%$]", str(folder)) and "chdir" not in script.options
        path = (facts.directory or Path()) / folder
        if is_plain and folder != facts.made and not path.is_dir():
            yield Finding(
                "output",
                "error",
                f"--{name} is in {folder}, which is no folder: Slurm makes none, and the job "
                "fails without a word",
                f"mkdir -p {folder}",
            )


def check_requeue(script: BatchScript) -> Iterator[Finding]:
    """Find ``scontrol requeue`` that nothing bounds, or that Slurm will refuse."""
    lines = script.requeues
    if lines and "no-requeue" in script.options:
        yield Finding(
            "requeue",
            "warning",
            f"line {lines[0]}: scontrol requeue, which Slurm refuses to a job with --no-requeue",
            "#SBATCH --requeue",
        )
    code = re.sub(r"(^|\s)#.*", "", script.text)
    if lines and "SLURM_RESTART_COUNT" not in code and not _COUNTS.search(code):
        yield Finding(
            "requeue",
            "warning",
            f"line {lines[0]}: scontrol requeue without a bound: a job that always stops early "
            "is queued for ever",
            'if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        )


def check_time(script: BatchScript) -> Iterator[Finding]:
    """Find a limit that Slurm cannot read, or one before the run's first checkpoint."""
    text = script.options.get("time", "")
    limit_s = time_limit_s(text)
    if limit_s is None:
        if text and "$" not in text and text.lower() not in UNLIMITED:
            yield Finding(
                "time limit",
                "error",
                f"--time={text} is no time of Slurm's, sbatch refuses it",
                "minutes, hours:minutes:seconds or days-hours, such as --time=02:00:00",
            )
        return
    for command in script.commands:
        every, is_said = _every(command, script.facts.directory)
        if not isinstance(every, str) or every in ("", "none", "auto"):
            continue
        try:
            every_s = parse_seconds(every)
        except ConfigError:  # the run itself will say so
            continue
        if limit_s < every_s:
            yield Finding(
                "time limit",
                "warning" if is_said else "note",
                f"line {command.line}: the job ends after {format_seconds(limit_s)}, and its run "
                f"saves a checkpoint every {format_seconds(every_s)}: when it breaks off, all is "
                "lost",
                f"--set checkpoint.every={max(1, round(limit_s / 240))}min, or a longer --time",
            )


def _signal(text: str) -> int | None:
    """Return the number of a signal: ``USR1``, ``SIGUSR1`` or ``10``."""
    if text.isdigit():
        return int(text)
    name = "SIG" + text.upper().removeprefix("SIG")
    return next((int(known) for known in Signals if known.name == name), None)


def _gpus_per_node(script: BatchScript) -> int | None:
    if (text := script.options.get("gpus-per-node")) is not None:
        return _num_gpus(text.split(","))
    asked = script.options.get("gres", "").split(",")
    if gpus := [each for each in asked if re.match(r"(gres[:/])?gpu\b", each)]:
        return _num_gpus(gpus)
    whole, nodes = _num_gpus(script.options.get("gpus", "").split(",")), script.number("nodes")
    return whole // nodes if nodes and whole % nodes == 0 else None


def _num_gpus(kinds: list[str]) -> int:
    """Sum up GPUs such as ``4``, ``a100:4`` or ``gpu:a100``, which is one; 0 if not known."""
    if any("$" in kind for kind in kinds):
        return 0
    counts = (re.search(r"(?:^|:)(\d+)$", kind) for kind in kinds if kind)
    return sum(int(match[1]) if match else 1 for match in counts)


def _tasks_per_node(script: BatchScript) -> int | None:
    """Return the ranks of a node; None where they are not known, or fit the GPUs by themselves."""
    steps, nodes = script.rank_steps, script.number("nodes") or 1
    words = [[word or "" for word in launcher.words] for launcher in script.launchers]
    options = set(script.options).union(*(step.options for step in steps))
    is_placed = any(word.startswith(_PLACES) for line in words for word in line)
    is_other = any(step.does_own_launching for step in steps)
    if is_placed or is_other or options & {*_BY_GPU} or not (steps or words):
        return None
    per_node, whole = script.number("ntasks-per-node"), script.number("ntasks")
    if per_node is None and "ntasks-per-node" in script.options:
        return None
    usual = per_node or (1 if whole is None else _share(whole, nodes))
    own = [dict(step.options) for step in steps]
    for line in words:
        after = [word for name, word in pairwise(line) if name in _NUM_RANKS]
        own.append({"ntasks": after[0]} if after else {})
    found = {_own_tasks(options, nodes, usual) for options in own}
    return found.pop() if len(found) == 1 else None


def _own_tasks(options: Mapping[str, str | None], nodes: int, usual: int | None) -> int | None:
    """Return the tasks of a node by a launcher's own options, ``usual`` where they say nothing."""
    if "ntasks-per-node" in options:
        return number(options, "ntasks-per-node")
    return _share(number(options, "ntasks"), nodes) if "ntasks" in options else usual


def _share(whole: int | None, nodes: int) -> int | None:
    return whole // nodes if whole and whole % nodes == 0 else None


def _every(command: Command, directory: Path | None) -> tuple[Any, bool]:
    """Return ``checkpoint.every`` of the run that a command starts, and whether it is said."""
    words = [word or UNKNOWN for word in command.words]
    names = [word.rpartition("/")[2] for word in words]
    starts = [at for at, pair in enumerate(pairwise(names), 2) if pair == ("hpctrain", "train")]
    rest = words[starts[0] :] if starts and "--dry-run" not in words else []
    text = " ".join(rest)
    if said := re.search(r"--set[= ]checkpoint\.every=(\S+)", text):
        value = said[1].strip("\"'")
        return (None if UNKNOWN in value else value), True
    names = re.sub(r"--(set|explain)(=|\s+)\S+", "", text).split()
    config = next((word for word in names if not word.startswith("-")), UNKNOWN)
    if UNKNOWN in config or directory is None:
        return None, False
    try:
        path = directory / Path(config).expanduser()
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RuntimeError, tomllib.TOMLDecodeError):
        return None, False  # hpctrain train will say what is wrong
    checkpoint = table.get("checkpoint")
    if isinstance(checkpoint, dict) and "every" in checkpoint:
        return checkpoint["every"], True
    return DEFAULT_EVERY, False
