"""Checks of what a batch script starts: ``srun``, ``mpirun`` and what they run."""

import re
from collections.abc import Iterator

from hpctrain.core.finding import Finding
from hpctrain.launch.slurm.lint.script import (
    MPIRUNS,
    BatchScript,
    LaunchLine,
    ScriptStep,
    base,
    inner,
    launcher_of,
)
from hpctrain.launch.slurm.lint.script_facts import LintFacts
from hpctrain.launch.slurm.lint.variables import UNKNOWN

_UTILITIES = frozenset(
    (
        *("awk", "cat", "chmod", "cp", "date", "df", "du", "echo", "env", "false", "find", "free"),
        *("grep", "head", "hostname", "id", "ls", "lscpu", "mkdir", "mv", "nproc", "numactl"),
        *("nvidia-smi", "printenv", "pwd", "rm", "rocm-smi", "rsync", "sbcast", "sed", "sleep"),
        *("sort", "tail", "tar", "taskset", "test", "touch", "true", "ulimit", "uname", "unzip"),
        *("uptime", "wc", "wget", "whoami", "zstd", "pip", "uv", "conda", "mamba", "git", "set"),
        *("cd", "exec", "export", "source", ".", "module", "ml", "[", "[[", "printf", "lfs"),
        *("conda-unpack", "stat", "sync", "umask", "unset", "if", "fi", "then", "else", "pigz"),
    )
)
"""Programs that no rank waits for: a step of these needs no care of an MPI program's."""

_TOOLS_OF_PYTHON = ("pip", "venv", "zipfile", "tarfile", "compileall", "ensurepip")
_OWN_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "ray")
"""Start several processes in a task and need no MPI."""


def is_ranks(step: ScriptStep, script: BatchScript) -> bool:
    """Say whether the tasks of a step are ranks which wait for each other."""
    if num_tasks(step, script) == 1:
        return False
    return any(_is_rank(words) for words in inner(step.program)) or not step.program


def num_tasks(step: ScriptStep, script: BatchScript) -> int | None:
    """Return how many tasks a step has; None where that is not known."""
    if (own := _number(step, "ntasks")) is not None or "ntasks" in step.options:
        return own
    nodes = _number(step, "nodes") or script.number("nodes")
    if (own := _number(step, "ntasks-per-node")) is not None:
        return None if nodes is None else own * nodes
    if step.options.get("pty") is not None:
        return 1
    if (whole := script.number("ntasks")) is not None:
        return whole
    per_node = script.number("ntasks-per-node")
    return None if per_node is None or nodes is None else per_node * nodes


def does_own_launching(step: ScriptStep) -> bool:
    """Say whether a step runs torchrun or one of its kind."""
    return any(
        base([word]) in _OWN_LAUNCHERS or word in ("torch.distributed.run", "pdsh")
        for words in inner(step.program)
        for word in words
    )


def check_kill(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find steps in which the ranks would wait for one that has died."""
    del facts
    for step in script.steps:
        if not is_ranks(step, script) or "no-kill" in {*step.options, *script.options}:
            continue
        if step.option("kill-on-bad-exit", "SLURM_KILL_BAD_EXIT") is None:
            yield Finding(
                "kill on bad exit",
                "warning",
                f"line {step.line}: srun without --kill-on-bad-exit=1: when one rank dies, the "
                "others wait for it until the time of the job is over",
                "srun --kill-on-bad-exit=1 ...",
            )


def check_mpi(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find steps whose ``--mpi`` does not fit the MPI library."""
    if not facts.needed_pmi:
        return
    for step in script.steps:
        if not is_ranks(step, script) or does_own_launching(step):
            continue
        said = step.option("mpi", "SLURM_MPI_TYPE")
        offered = facts.default_pmi if said is None else said
        do = f"srun --mpi={facts.needed_pmi} ..."
        if said is None and not offered:
            yield Finding(
                "srun --mpi",
                "note",
                f"line {step.line}: srun without --mpi takes what the site has chosen; the MPI "
                f"of this environment needs {facts.needed_pmi}",
                do,
            )
        elif UNKNOWN not in offered and not _fits(offered, facts.needed_pmi):
            shown = f"--mpi={said}" if said is not None else f"MpiDefault={offered}"
            yield Finding(
                "srun --mpi",
                "error" if _is_certain(step, script) else "warning",
                f"line {step.line}: srun with {shown}, but the MPI of this environment needs "
                f"{facts.needed_pmi}: each rank would be alone in a world of its own",
                do,
            )


def check_nesting(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find ``srun mpirun`` and ``mpirun srun``."""
    del facts
    for step in script.steps:
        for words in inner(step.program):
            if found := launcher_of(words, step.line):
                yield Finding(
                    "nested launchers",
                    "error",
                    f"line {step.line}: srun starts {found.name}, once for each task, and each "
                    "of them starts ranks",
                    f"one launcher: srun --mpi=... PROGRAM, or {found.name} ... without srun",
                )
    for launcher in script.launchers:
        if _runs_srun(launcher):
            yield Finding(
                "nested launchers",
                "error",
                f"line {launcher.line}: {launcher.name} starts srun, once for each rank, and "
                "each of them starts tasks",
                f"one launcher: srun --mpi=... PROGRAM, or {launcher.name} ... PROGRAM",
            )


def check_cores(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find steps that do not get the cores their tasks have asked for."""
    del facts
    cores = script.number("cpus-per-task")
    if cores is None or cores == 1:
        return
    for step in script.steps:
        said = step.option("cpus-per-task", "SRUN_CPUS_PER_TASK")
        if is_ranks(step, script) and said is None:
            yield Finding(
                "cores of a task",
                "warning",
                f"line {step.line}: --cpus-per-task={cores} holds for sbatch; srun does not take "
                "it over since Slurm 22.05, so that a rank computes on one core",
                "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
            )


def _number(step: ScriptStep, name: str) -> int | None:
    value = step.options.get(name) or ""
    return int(value) if value.isdigit() else None


def _is_rank(words: list[str | None]) -> bool:
    """Say whether a command may be one whose processes wait for each other."""
    name = base(words)
    if name in _UTILITIES or name in MPIRUNS:
        return False
    known = [word or "" for word in words]
    if re.fullmatch(r"python[\d.]*", name) and known[1:2] == ["-m"]:
        return known[2:3] == [] or known[2] not in _TOOLS_OF_PYTHON
    return True


def _is_certain(step: ScriptStep, script: BatchScript) -> bool:
    """Say whether the step runs hpctrain with the MPI of this environment."""
    changes = ("module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack")
    if any(base(list(words)) in changes for _, words in script.commands):
        return False
    return any(base([word]) == "hpctrain" for words in inner(step.program) for word in words)


def _fits(offered: str, needed: str) -> bool:
    return offered == needed or offered.startswith(f"{needed}_")


def _runs_srun(launcher: LaunchLine) -> bool:
    before = ""
    for word in launcher.words:
        if base([word]) == "srun" and not before.startswith(("-launcher", "-bootstrap", "--laun")):
            return True
        before = word or ""
    return False
