"""Checks of what a batch script asks Slurm for: tasks, GPUs, signals, requeues."""

import re
from collections.abc import Iterator
from itertools import pairwise
from signal import Signals

from hpctrain.core.finding import Finding
from hpctrain.launch.slurm.lint.script import BatchScript, base
from hpctrain.launch.slurm.lint.script_facts import LintFacts
from hpctrain.launch.slurm.lint.step_checks import does_own_launching, is_ranks

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


def check_header(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find what sbatch refuses or does not read."""
    del facts
    if not script.text.startswith("#!"):
        yield Finding(
            "script",
            "error",
            "the first line must name the shell, sbatch refuses a script without it",
            "begin with #!/bin/bash",
        )
    if "\r\n" in script.text:
        yield Finding(
            "script",
            "error",
            "lines end as in DOS, sbatch refuses such a script",
            "sed -i 's/\\r$//' SCRIPT",
        )
    for line in script.late:
        yield Finding(
            "script",
            "warning",
            f"line {line}: #SBATCH behind the first command: sbatch does not read it",
            "move it to the top",
        )
    for name, value in script.options.items():
        if re.search(r"\$\w|\$\{", value):
            yield Finding(
                "script",
                "warning",
                f"#SBATCH --{name}={value}: sbatch expands no variables",
                "write the value itself, or give it on the command line: "
                f'sbatch --{name}="..." SCRIPT',
            )


def check_gpus(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find more or fewer ranks on a node than it has GPUs for them."""
    del facts
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


def check_tasks(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find a number of tasks that Slurm may spread over the nodes as it likes."""
    del facts
    tasks = script.number("ntasks")
    spread = ("ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "distribution")
    if tasks is None or tasks == 1 or script.number("nodes") == 1 or not _has_ranks(script):
        return
    steps = [step for step in script.steps if is_ranks(step, script)]
    if any(name in script.options for name in spread) or (
        steps and all(any(name in step.options for name in (*spread, "nodes")) for step in steps)
    ):
        return
    nodes = script.number("nodes")
    even = f"--nodes={nodes} --ntasks-per-node={tasks // nodes}" if nodes else ""
    if not nodes or tasks % nodes:
        even = "--nodes=N --ntasks-per-node=M"
    yield Finding(
        "tasks per node",
        "warning",
        f"--ntasks={tasks} without --ntasks-per-node: Slurm fills one node after the other, and "
        "the last one has fewer ranks",
        f"#SBATCH {even}",
    )


def check_signal(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find a job that is to go on later and is not told to save its state."""
    del facts
    said = script.options.get("signal")
    if said is None and is_requeued(script):
        yield Finding(
            "signal",
            "warning",
            "the job may be queued again, but no --signal tells the run to save its state before",
            "#SBATCH --signal=USR1@120",
        )
    if said is None or not re.match(r"R?B", said) or script.variables.has_unread_sources:
        return
    number = _signal(re.sub(r"^\w*:|@.*$", "", said))
    traps = [words for _, words in script.commands if base(list(words)) == "trap"]
    handled = {_signal(word or "") for words in traps for word in words[2:]}
    is_replaced = re.search(r"^\s*exec\s+\w*run\b", script.text, re.MULTILINE)
    if number in handled or is_replaced or any(None in words for words in traps):
        return
    yield Finding(
        "signal",
        "warning",
        f"--signal={said} goes to the batch shell alone, which has no trap for it and ends by it",
        "#SBATCH --signal=USR1@120 reaches the ranks; or a trap that hands it on",
    )


def check_output(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find a job whose second run would empty the output of its first."""
    del facts
    is_kept = script.options.get("open-mode", "").lower().startswith("a")
    if is_requeued(script) and not is_kept:
        yield Finding(
            "output",
            "warning",
            "the job may be queued again, and without --open-mode=append each run empties the "
            "output of those before",
            "#SBATCH --open-mode=append",
        )


def check_requeue(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find ``scontrol requeue`` that nothing bounds, or that Slurm will refuse."""
    del facts
    lines = _requeues(script)
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


def is_requeued(script: BatchScript) -> bool:
    """Say whether a job is meant to be queued again."""
    return "requeue" in script.options or bool(_requeues(script))


def _signal(text: str) -> int | None:
    """Return the number of a signal: ``USR1``, ``SIGUSR1`` or ``10``."""
    if text.isdigit():
        return int(text)
    name = "SIG" + text.upper().removeprefix("SIG")
    return next((int(known) for known in Signals if known.name == name), None)


def _requeues(script: BatchScript) -> list[int]:
    return [
        line
        for line, words in script.commands
        if base(list(words)) == "scontrol" and "requeue" in words
    ]


def _has_ranks(script: BatchScript) -> bool:
    return bool(script.launchers) or any(is_ranks(step, script) for step in script.steps)


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
    by_gpu = ("ntasks-per-gpu", "gpus-per-task", "ntasks-per-socket", "gpus-per-socket")
    steps = [step for step in script.steps if is_ranks(step, script)]
    options = set(script.options).union(*(step.options for step in steps))
    if any(name in options for name in by_gpu) or any(map(does_own_launching, steps)):
        return None
    if not _has_ranks(script):
        return None
    nodes = script.number("nodes") or 1
    counts = [_own_tasks_per_node(dict(step.options), nodes) for step in steps]
    for launcher in script.launchers:
        words = [word or "" for word in launcher.words]
        if any(word.startswith(_PLACES) for word in words):
            return None
        after = [word for name, word in pairwise(words) if name in _NUM_RANKS]
        counts.append(_own_tasks_per_node({"ntasks": after[0]}, nodes) if after else 0)
    whole, per_node = script.number("ntasks"), script.number("ntasks-per-node")
    if "ntasks-per-node" in script.options and per_node is None:
        return None
    usual = per_node or (1 if whole is None else whole // nodes if whole % nodes == 0 else None)
    found = {usual if count == 0 else count for count in counts}
    return found.pop() if len(found) == 1 else None


def _own_tasks_per_node(options: dict[str, str | None], nodes: int) -> int | None:
    """Return what a launcher's own options say; 0 where they say nothing."""
    if "ntasks-per-node" in options:
        text = options["ntasks-per-node"] or ""
        return int(text) if text.isdigit() else None
    if "ntasks" not in options:
        return 0
    text = options["ntasks"] or ""
    whole = int(text) if text.isdigit() else 1
    return whole // nodes if text.isdigit() and whole % nodes == 0 else None
