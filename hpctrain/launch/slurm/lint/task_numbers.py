"""Checks of the numbers of tasks and GPUs of a batch script."""

import re
from collections.abc import Iterator
from itertools import pairwise

from hpctrain.core.units import plural
from hpctrain.launch.slurm.lint.script import BatchScript, Fault, Options, number

_PLACES = ("-N", "--map-by", "-map-by", "-npernode", "--npernode", "-ppn", "-perhost", "-ppr")
"""Options of mpirun for the number of ranks per node."""

_NUM_RANKS = ("-n", "-np", "--np", "--ranks", "-c")
"""Options of mpirun for the number of ranks."""

_BY_GPU = ("ntasks-per-gpu", "gpus-per-task", "ntasks-per-socket", "gpus-per-socket")


def uneven_tasks(script: BatchScript) -> Iterator[Fault]:
    """Find tasks that do not divide evenly among the nodes."""
    tasks, nodes = script.number("ntasks"), script.number("nodes")
    spread = {"ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "distribution"}
    steps = script.rank_steps
    if tasks and nodes and tasks < nodes and (script.steps or script.launchers):
        what = f"every node must have a task, got --ntasks={tasks} for --nodes={nodes}"
        yield "warning", what, f"#SBATCH --nodes={nodes} --ntasks-per-node=1"
        return
    if tasks in (None, 1) or nodes == 1 or not (steps or script.launchers):
        return
    if spread & {*script.options} or (
        steps and all({*spread, "nodes"} & {*step.options} for step in steps)
    ):
        return
    even = "--nodes=N --ntasks-per-node=M"
    if tasks and nodes and tasks % nodes == 0:
        even = f"--nodes={nodes} --ntasks-per-node={tasks // nodes}"
    what = (
        f"nodes must have equal numbers of ranks, but with --ntasks={tasks} and without "
        "--ntasks-per-node Slurm fills node after node, and the last node has fewer ranks"
    )
    yield "warning", what, f"#SBATCH {even}"


def unequal_gpus(script: BatchScript) -> Iterator[Fault]:
    """Find nodes with more or fewer ranks than GPUs."""
    gpus, tasks = gpus_per_node(script), tasks_per_node(script)
    if not gpus or not tasks or gpus == tasks:
        return
    do = f"#SBATCH --ntasks-per-node={gpus}"
    if tasks > gpus:
        what = f"each rank must have its own GPU, but {tasks} share {plural(gpus, 'GPU')}"
        yield "warning", what, f"{do}, or --gpus-per-node={tasks}"
    else:
        of = f"{plural(tasks, 'rank')} for {gpus} GPUs of a node"
        what = f"each GPU must have a rank, but with {of} {gpus - tasks} would be idle"
        yield "warning", what, do


def isolated_gpus(script: BatchScript) -> Iterator[Fault]:
    """Find steps in which each rank sees only its own GPU."""
    for options in (script.options, *(step.options for step in script.rank_steps)):
        bound = options.get("gpu-bind", "")
        if bound == "none" or _binds_none(script):
            continue
        if "gpus-per-task" in options or bound:
            name = "gpu-bind" if bound else "gpus-per-task"
            what = (
                "a rank must see all GPUs of its node to access their memory, but with "
                f"--{name}={options[name]} a rank sees its own GPU only: the host sums gradients"
            )
            yield "warning", what, "#SBATCH --gpus-per-node=N instead, or srun --gpu-bind=none"


def _binds_none(script: BatchScript) -> bool:
    steps = script.rank_steps
    return bool(steps) and all(step.options.get("gpu-bind") == "none" for step in steps)


def gpus_per_node(script: BatchScript) -> int | None:
    """Return the number of GPUs per node that a job requests; None or 0 if unknown."""
    if (text := script.options.get("gpus-per-node")) is not None:
        return _num_gpus(text.split(","))
    gres = script.options.get("gres", "").split(",")
    if gpus := [each for each in gres if re.match(r"(gres[:/])?gpu\b", each)]:
        return _num_gpus(gpus)
    return _share(_num_gpus(script.options.get("gpus", "").split(",")), script.number("nodes"))


def _num_gpus(kinds: list[str]) -> int:
    """Parse a number of GPUs: 4 for ``4`` and ``a100:4``, 1 for ``gpu:a100``; 0 if unknown."""
    if any("$" in kind for kind in kinds):
        return 0
    counts = (re.search(r"(?:^|:)(\d+)$", kind) for kind in kinds if kind)
    return sum(int(match[1]) if match else 1 for match in counts)


def tasks_per_node(script: BatchScript) -> int | None:
    """Return the number of ranks per node; None if unknown, or if ranks are placed by GPU."""
    steps, nodes = script.rank_steps, script.number("nodes") or 1
    words = [launcher.words for launcher in script.launchers]
    options = set(script.options).union(*(step.options for step in steps))
    is_placed = any(word.startswith(_PLACES) for line in words for word in line)
    is_other = any(step.does_own_launching for step in steps)
    if is_placed or is_other or options & {*_BY_GPU} or not (steps or words):
        return None
    per_node, whole = script.number("ntasks-per-node"), script.number("ntasks")
    if per_node is None and "ntasks-per-node" in script.options:
        return None
    usual = per_node or (1 if whole is None else _share(whole, nodes))
    own: list[Options] = [step.options for step in steps]
    for line in words:
        after = [word for name, word in pairwise(line) if name in _NUM_RANKS]
        own.append({"ntasks": after[0]} if after else {})
    found = {_own_tasks(options, nodes, usual) for options in own}
    return found.pop() if len(found) == 1 else None


def _own_tasks(options: Options, nodes: int, usual: int | None) -> int | None:
    """Return the tasks per node that a launcher's options request, or else ``usual``."""
    if "ntasks-per-node" in options:
        return number(options, "ntasks-per-node")
    return _share(number(options, "ntasks"), nodes) if "ntasks" in options else usual


def _share(whole: int | None, nodes: int | None) -> int | None:
    return whole // nodes if whole and nodes and whole % nodes == 0 else None


RULES = {
    "tasks per node": uneven_tasks,
    "tasks and GPUs": unequal_gpus,
    "GPUs of a rank": isolated_gpus,
}
"""Checks of this module, by the names of their findings."""
