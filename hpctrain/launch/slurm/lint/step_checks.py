"""Checks of what a batch script starts: ``srun``, ``mpirun`` and what they run."""

import re
from collections.abc import Iterator

from hpctrain.core.finding import Finding
from hpctrain.launch.slurm.lint.script import (
    OWN_LAUNCHERS,
    BatchScript,
    ScriptStep,
    launcher_of,
)
from hpctrain.launch.slurm.lint.shell import UNKNOWN, Command


def check_start(script: BatchScript) -> Iterator[Finding]:
    """Find a program that runs once although the job has asked for many tasks."""
    tasks = script.num_tasks
    if script.steps or script.launchers or not tasks or tasks == 1:
        return
    if any(command.name in ("", "source", ".", *OWN_LAUNCHERS) for command in script.commands):
        return  # what is not known may start ranks
    for command in script.commands:
        words = [word or "" for word in command.words]
        is_script = command.name.startswith("python") and any(w.endswith(".py") for w in words)
        if is_script or words[:2] == ["hpctrain", "train"]:
            yield Finding(
                "start of the ranks",
                "error",
                f"line {command.line}: {command.name} without srun runs once, on the first node, "
                f"and {tasks - 1} of {tasks} tasks do nothing",
                f"srun --kill-on-bad-exit=1 {' '.join(words[:2])} ...",
            )


def check_background(script: BatchScript) -> Iterator[Finding]:
    """Find ranks in the background of a script that does not wait for them."""
    if any(command.name == "wait" for command in script.commands):
        return
    for command in script.commands:
        if command.is_background and (command.name == "srun" or launcher_of(command)):
            yield Finding(
                "background",
                "error",
                f"line {command.line}: {command.name} in the background, and the script ends "
                "without a wait: the job and its ranks end with it",
                "leave the & out, or add a line: wait",
            )


def check_rendezvous(script: BatchScript) -> Iterator[Finding]:
    """Find what torchrun and its kind want in a place where it does not work."""
    per_node = script.number("ntasks-per-node")
    for step in script.steps:
        own = step.options.get("ntasks-per-node", per_node)
        if step.does_own_launching and str(own or 1).isdigit() and int(own or 1) > 1:
            yield Finding(
                "nested launchers",
                "error",
                f"line {step.line}: srun starts torchrun or its like {own} times on each node, "
                "and each of them starts ranks for all GPUs",
                "srun --ntasks-per-node=1 torchrun ..., or srun PROGRAM without torchrun",
            )
    line = script.shell.assigned.get("MASTER_ADDR", 0)
    if script.steps and line > max(step.line for step in script.steps):
        yield Finding(
            "rendezvous",
            "warning",
            f"line {line}: MASTER_ADDR is set behind the last srun, whose tasks do not see it",
            "export MASTER_ADDR above srun; hpctrain needs none",
        )


def check_kill(script: BatchScript) -> Iterator[Finding]:
    """Find steps in which the ranks would wait for one that has died."""
    for step in script.rank_steps:
        is_said = step.option("kill-on-bad-exit", "SLURM_KILL_BAD_EXIT") is not None
        if not is_said and "no-kill" not in {*step.options, *script.options}:
            yield Finding(
                "kill on bad exit",
                "warning",
                f"line {step.line}: srun without --kill-on-bad-exit=1: when one rank dies, the "
                "others wait for it until the time of the job is over",
                "srun --kill-on-bad-exit=1 ...",
            )


def check_mpi(script: BatchScript) -> Iterator[Finding]:
    """Find steps whose ``--mpi`` does not fit the MPI library."""
    needed = script.facts.needed_pmi
    for step in script.rank_steps if needed else ():
        if step.does_own_launching:
            continue
        said = step.option("mpi", "SLURM_MPI_TYPE")
        offered = script.facts.default_pmi if said is None else said
        do = f"srun --mpi={needed} ..."
        if said is None and not offered:
            yield Finding(
                "srun --mpi",
                "note",
                f"line {step.line}: srun without --mpi takes what the site has chosen; the MPI "
                f"of this environment needs {needed}",
                do,
            )
        elif UNKNOWN not in offered and offered != needed and not offered.startswith(f"{needed}_"):
            shown = f"--mpi={said}" if said is not None else f"MpiDefault={offered}"
            yield Finding(
                "srun --mpi",
                "error" if _is_certain(step, script) else "warning",
                f"line {step.line}: srun with {shown}, but the MPI of this environment needs "
                f"{needed}: each rank would be alone in a world of its own",
                do,
            )


def check_nesting(script: BatchScript) -> Iterator[Finding]:
    """Find ``srun mpirun`` and ``mpirun srun``."""
    for step in script.steps:
        for found in filter(None, map(launcher_of, step.programs)):
            yield Finding(
                "nested launchers",
                "error",
                f"line {step.line}: srun starts {found}, once for each task, and each "
                "of them starts ranks",
                f"one launcher: srun --mpi=... PROGRAM, or {found} ... without srun",
            )
    for launcher in filter(_runs_srun, script.launchers):
        yield Finding(
            "nested launchers",
            "error",
            f"line {launcher.line}: {launcher_of(launcher)} starts srun, once for each rank, and "
            "each of them starts tasks",
            f"one launcher: srun --mpi=... PROGRAM, or {launcher_of(launcher)} ... PROGRAM",
        )


def check_cores(script: BatchScript) -> Iterator[Finding]:
    """Find steps that do not get the cores their tasks have asked for."""
    cores = script.number("cpus-per-task")
    for step in script.rank_steps if cores not in (None, 1) else ():
        if step.option("cpus-per-task", "SRUN_CPUS_PER_TASK") is None:
            yield Finding(
                "cores of a task",
                "warning",
                f"line {step.line}: --cpus-per-task={cores} holds for sbatch; srun does not take "
                "it over since Slurm 22.05, so that a rank computes on one core",
                "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
            )


def _is_certain(step: ScriptStep, script: BatchScript) -> bool:
    """Say whether the step runs hpctrain with the MPI of this environment."""
    changes = ("module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack")
    if any(command.name in changes for command in script.commands):
        return False
    words = (word or "" for program in step.programs for word in program.words)
    return any(word.rpartition("/")[2] == "hpctrain" for word in words)


def _runs_srun(launcher: Command) -> bool:
    text = " ".join(word or UNKNOWN for word in launcher.words)
    # Hydra may use srun to reach the nodes: -launcher srun.
    text = re.sub(r"-(launcher|bootstrap)[ =]srun\b", "", text)
    return re.search(r"(^|[ /])srun( |$)", text) is not None
