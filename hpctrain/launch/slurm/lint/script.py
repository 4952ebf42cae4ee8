"""A batch script as the checks see it: its ``#SBATCH`` lines, its steps, its launchers."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hpctrain.launch.slurm.lint.options import parse
from hpctrain.launch.slurm.lint.shell import RESERVED, Command, Word, commands
from hpctrain.launch.slurm.lint.variables import UNKNOWN, Variables

MPIRUNS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpirun.openmpi", "orterun")
"""Programs that start ranks; ``hpctrain launch`` is one more."""

_WRAPPERS = (
    *("exec", "nohup", "command", "env", "timeout", "nice", "ionice", "stdbuf", "numactl"),
    *("time", "taskset", "builtin", "setsid"),
)
_WRAPPER_WORD = re.compile(r"-.*|\d+[smhd]?|0x\w+|\w+=.*", re.DOTALL)
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """One ``srun``."""

    line: int
    options: Mapping[str, str | None]
    """By long name; None for a value that is not known."""
    program: tuple[str | None, ...]
    """What each task runs; None for words that are not known."""
    is_complete: bool
    """Whether all options are known."""
    environ: Mapping[str, str]
    """Variables that the script sets for it, as far as known."""

    def option(self, name: str, variable: str) -> str | None:
        """Return what an option or else a variable says; None for what is said nowhere.

        ``UNKNOWN`` stands for a value that only a run would tell.
        """
        if name in self.options:
            value = self.options[name]
            return UNKNOWN if value is None or UNKNOWN in value else value
        if variable in self.environ:
            return self.environ[variable]
        return None if self.is_complete else UNKNOWN


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """One ``mpirun`` or ``hpctrain launch``."""

    line: int
    name: str
    words: tuple[str | None, ...]
    """What stands behind the name."""


@dataclass(frozen=True, slots=True)
class BatchScript:
    """A batch script, read once."""

    text: str
    options: Mapping[str, str]
    """Of the ``#SBATCH`` lines, by long name."""
    late: tuple[int, ...]
    """Lines that sbatch does not read: behind the first command."""
    steps: tuple[ScriptStep, ...]
    launchers: tuple[LaunchLine, ...]
    commands: tuple[tuple[int, tuple[str | None, ...]], ...]
    """All commands, expanded as far as known, each with its line."""
    variables: Variables

    def number(self, name: str) -> int | None:
        """Return the value of an option of sbatch; None where it is not one whole number."""
        text = self.options.get(name, "")
        return int(text) if text.isdigit() else None


def read(text: str, environ: Mapping[str, str], directory: Path | None) -> BatchScript:
    """Read a script.

    Args:
        text: of the script.
        environ: variables that it will find set.
        directory: where relative names begin; None reads no other file.
    """
    options, late = _directives(text)
    found = commands(text)
    inherited = {name: value for name, value in environ.items() if not name.startswith("SLURM")}
    given = {**inherited, **_exported(options), **_by_slurm(options)}
    variables = Variables(found, given=given, directory=directory)
    steps: list[ScriptStep] = []
    launchers: list[LaunchLine] = []
    expanded = []
    for command in found:
        words = _behind_wrappers(variables.words(_behind_keywords(command.words)))
        expanded.append((command.line, tuple(words)))
        if launcher := launcher_of(words, command.line):
            launchers.append(launcher)
        elif base(words) == "srun" and len(words) > 1:
            steps.append(_step(command, words, variables))
    return BatchScript(
        text, options, late, tuple(steps), tuple(launchers), tuple(expanded), variables
    )


def launcher_of(words: list[str | None], line: int) -> LaunchLine | None:
    """Return the launcher that a command is; None for others, and for one without arguments."""
    if base(words) in MPIRUNS and len(words) > 1:
        return LaunchLine(line, base(words), tuple(words[1:]))
    if base(words) == "hpctrain" and words[1:2] == ["launch"]:
        return LaunchLine(line, "hpctrain launch", tuple(words[2:]))
    return None


def inner(program: tuple[str | None, ...]) -> Iterator[list[str | None]]:
    """Return the commands that a step runs: its program, or those of ``bash -c "..."``."""
    words = _behind_wrappers(list(program))
    for flag, text in pairwise(words[1:]):
        if base(words) in _SHELLS and flag is not None and re.fullmatch(r"-\w*c", flag):
            for command in commands(text or ""):
                texts = [word.text for word in _behind_keywords(command.words)]
                if texts:
                    yield _behind_wrappers([*texts])
            return
    if words:
        yield words


def base(words: list[str | None]) -> str:
    """Return the name of the program that a command runs, without its folder."""
    return (words[0] or "").rpartition("/")[2] if words else ""


def _directives(text: str) -> tuple[dict[str, str], tuple[int, ...]]:
    options: dict[str, str] = {}
    late: list[int] = []
    is_over = is_other = False
    for number, line in enumerate(text.splitlines(), 1):
        is_over = is_over or bool(line.strip() and not line.lstrip().startswith("#"))
        if not line.startswith("#SBATCH"):
            continue
        if is_over:
            late.append(number)
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:  # an open quote
            words = line.split()[1:]
        parsed = parse(words, is_sbatch=True)
        is_other = is_other or bool({"hetjob", "packjob"} & {*parsed.rest})
        if not is_other:  # what follows is another part of a heterogeneous job
            options |= {name: value or "" for name, value in parsed.options.items()}
    return options, tuple(late)


def _exported(options: Mapping[str, str]) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in options.get("export", "").split(","))
    return {name: value for name, equals, value in pairs if equals}


def _by_slurm(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Slurm sets by these options, where they are plain numbers."""
    names = {
        "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
        "job-name": ("SLURM_JOB_NAME",),
    }
    return {
        variable: options[option]
        for option, variables in names.items()
        for variable in variables
        if options.get(option)
    }


def _step(command: Command, words: list[str | None], variables: Variables) -> ScriptStep:
    parsed = parse(words[1:])
    own = {
        name: " ".join(w or UNKNOWN for w in variables.words(values))
        for name, values in command.assigned.items()
    }
    around = {
        name: " ".join(values) if values is not None else UNKNOWN
        for name, values in variables.values.items()
    }
    environ = {**variables.given, **around, **own}
    return ScriptStep(command.line, parsed.options, parsed.rest, parsed.is_complete, environ)


def _behind_keywords(words: list[Word]) -> list[Word]:
    at = 0
    while at < len(words) and words[at].text in RESERVED and not words[at].quoted:
        at += 1
    return words[at:]


def _behind_wrappers(words: list[str | None]) -> list[str | None]:
    """Leave out ``timeout 60``, ``env X=1`` and their like in front of a command."""
    at = 0
    while base(words[at:]) in _WRAPPERS:
        at += 1
        while at < len(words) and _WRAPPER_WORD.fullmatch(words[at] or ""):
            at += 1
    return words[at:] if at < len(words) else words
