"""Checks of the options, files, variables and memory of a batch script."""

import re
from collections.abc import Iterator
from pathlib import Path

from hpctrain.launch.slurm.lint.script import BatchScript, Command, Fault, number
from hpctrain.launch.slurm.scheduler import megabytes

LEAST_MB = 1000  # a process that imported torch needs half of this

_HOURS = ("12", "24", "36", "48", "72", "96", "168")  # probably meant as hours
_HERE = ("localhost", "127.0.0.1")


def units(script: BatchScript) -> Iterator[Fault]:
    """Find memory sizes or times that probably lack a unit."""
    for name in ("mem", "mem-per-cpu"):
        given = script.options.get(name, "")
        if 0 < (mb := megabytes(given) or 0) < LEAST_MB:
            got = f"got --{name}={given}, which is {mb:g} MB"
            what = f"a job must have memory to import torch, {got}"
            yield (
                "warning",
                what,
                f"#SBATCH --{name}={given.rstrip('kKmMbB')}G, if gigabytes are meant",
            )
    if (text := script.options.get("time")) in _HOURS:
        what = f"--time without a colon must be in minutes, got --time={text}"
        yield "warning", what, f"#SBATCH --time={text}:00:00, if hours are meant"


def threads(script: BatchScript) -> Iterator[Fault]:
    """Find steps with more threads than cores per task."""
    text = script.environ.get("OMP_NUM_THREADS", "")
    is_own = "OMP_NUM_THREADS" in script.assigned and text.isdigit()
    for step in script.rank_steps if is_own and "exclusive" not in script.options else ():
        option = step.option("cpus-per-task", "SRUN_CPUS_PER_TASK")
        is_of_job = option is None or "SLURM_CPUS_PER_TASK" in option
        cores = script.options.get("cpus-per-task", "1") if is_of_job else option or ""
        if cores.isdigit() and int(text) > int(cores) and script.num_tasks != 1:
            line = script.assigned.get("OMP_NUM_THREADS", step.line)
            what = (
                f"line {line}: each thread of a task must have a core, got OMP_NUM_THREADS={text} "
                f"for --cpus-per-task={cores}"
            )
            yield "warning", what, "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"


def rendezvous(script: BatchScript) -> Iterator[Fault]:
    """Find ``torch.distributed`` variables that have a wrong value or are set in a wrong place."""
    assigned = script.assigned
    steps = [step for step in script.rank_steps if not step.does_own_launching]
    if not steps:
        return
    line = assigned.get("MASTER_ADDR", 0)
    if line > max(step.line for step in steps):
        what = f"line {line}: MASTER_ADDR must be set before srun, but is set after the last srun"
        yield "warning", what, "export MASTER_ADDR above srun; hpctrain does not need MASTER_ADDR"
    elif line and script.environ.get("MASTER_ADDR") in _HERE and script.number("nodes") != 1:
        host = script.environ["MASTER_ADDR"]
        what = f"line {line}: MASTER_ADDR must be one node for all ranks, but is {host}"
        do = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield "warning", what, f"{do}; hpctrain does not need MASTER_ADDR"
    for name, of_slurm in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID")):
        if name in assigned:
            what = (
                f"line {assigned[name]}: {name} must differ between tasks, got one value for all"
            )
            do = f"srun bash -c 'export {name}=${of_slurm}; exec \"$@\"' rank PROGRAM ..."
            yield "error", what, f"{do}; hpctrain does not need {name}"


def step_tasks(script: BatchScript) -> Iterator[Fault]:
    """Find steps that start more tasks than the job has."""
    whole = script.num_tasks
    for step in script.steps if whole and not {"overcommit", "O"} & {*script.options} else ():
        own = number(step.options, "ntasks")
        if whole and own and own > whole and not {"overcommit", "O"} & {*step.options}:
            what = (
                f"line {step.line}: srun must start at most all {whole} tasks of a job, got {own}"
            )
            yield "error", what, f"#SBATCH --ntasks={own}, or srun without -n"


def files(script: BatchScript) -> Iterator[Fault]:
    """Find missing files; relative names are checked only if the directory is known."""
    facts = script.facts
    moves = any(command.name in ("cd", "pushd") for command in script.commands)
    if facts.directory is None:
        return
    bare = [step for step in script.steps if not any("container" in name for name in step.options)]
    inside = [command for step in bare for command in step.programs]
    for command in [*script.commands, *inside]:
        for name in _files(command):
            if re.search(r"[$*?]", name):
                continue
            path = Path(name)
            is_movable = not path.is_absolute() and not name.startswith("~")
            if is_movable and (moves or "chdir" in script.options):
                continue
            try:
                is_there = (facts.directory / path.expanduser()).exists()
            except (OSError, RuntimeError):
                continue
            if not is_there:
                what = f"line {command.line}: {command.name} must get an existing file, got {name}"
                do = "correct the path, which is relative to the folder where sbatch is called"
                yield "warning", what, do


def _files(command: Command) -> Iterator[str]:
    """Yield the files that a command needs at its start."""
    rest = command.words[1:]
    if command.name in ("source", ".") and rest and rest[0].endswith("/activate"):
        yield rest[0]
    elif command.name == "hpctrain" and rest[:1] == ("train",):
        yield from (word for word in rest if word.endswith(".toml"))
    elif re.fullmatch(r"python[\d.]*", command.name):
        first = next((word for word in rest if not word.startswith("-")), "")
        if first.endswith(".py") and "-c" not in rest and "-m" not in rest:
            yield first


RULES = {
    "units": units,
    "threads": threads,
    "rendezvous": rendezvous,
    "tasks of a step": step_tasks,
    "files": files,
}
"""Checks of this module, by the names of their findings."""
