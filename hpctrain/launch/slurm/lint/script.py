"""A batch script as the checks see it: its ``#SBATCH`` lines, its steps, its launchers."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from hpctrain.launch.slurm.lint.shell import SHELLS, UNKNOWN, Command, ShellScript, behind_wrappers

MPIRUNS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpirun.openmpi", "orterun")
"""Programs that start ranks; ``hpctrain launch`` is one more."""

OWN_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "ray", "torch.distributed.run", "pdsh")
"""Start several processes in a task and need no MPI."""

_UTILITIES = frozenset(
    (
        *("awk", "cat", "chmod", "cp", "date", "df", "du", "echo", "env", "false", "find", "free"),
        *("grep", "head", "hostname", "id", "ls", "lscpu", "mkdir", "mv", "nproc", "numactl"),
        *("nvidia-smi", "printenv", "pwd", "rm", "rocm-smi", "rsync", "sbcast", "sed", "sleep"),
        *("sort", "tail", "tar", "taskset", "test", "touch", "true", "ulimit", "uname", "unzip"),
        *("uptime", "wc", "wget", "whoami", "zstd", "pip", "uv", "conda", "mamba", "git", "set"),
        *("cd", "exec", "export", "source", ".", "module", "ml", "printf", "lfs"),
        *("conda-unpack", "stat", "sync", "umask", "unset", "pigz", "scontrol", "squeue"),
    )
)
"""Programs that no rank waits for: a step of these needs no care of an MPI program's."""

_TOOLS_OF_PYTHON = ("pip", "venv", "zipfile", "tarfile", "compileall", "ensurepip")

_BY_SLURM = {
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NPROCS": "ntasks",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_JOB_NAME": "job-name",
}
"""Variables that Slurm sets by an option."""


SHORT = {
    "c": "cpus-per-task",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "K": "kill-on-bad-exit",
    "k": "no-kill",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "t": "time",
    "W": "wait",
}
"""One-letter options that a check asks for, by their long names; others keep their letter."""

ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks"}
"""Other spellings that Slurm takes."""

FLAGS = frozenset(
    (
        *("contiguous", "disable-status", "exact", "external", "help", "hold"),
        *("ignore-pbs", "label", "multi-prog", "no-allocate", "no-requeue", "overcommit"),
        *("overlap", "oversubscribe", "parsable", "preserve-env", "pty", "quiet"),
        *("quit-on-interrupt", "reboot", "requeue", "resv-ports", "spread-job", "stepmgr"),
        *("test-only", "unbuffered", "usage", "use-min-nodes", "verbose", "version"),
        *"EHhlOQsuVvXZ",
    )
)
"""Options that never take a value."""

OPTIONAL = frozenset(
    (
        *("bcast", "compress", "exclusive", "get-user-env", "immediate", "kill-on-bad-exit"),
        *("nice", "no-kill", "propagate", "send-libs", "I"),
    )
)
"""Options whose value, if any, is joined to them: ``--nice=5``, ``-K0``."""


Options = Mapping[str, str | None]
"""By long name; empty for a flag; None for a value that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFacts:
    """Facts beside the script; a check that lacks one is left out."""

    needed_pmi: str = ""
    """What ``srun --mpi=`` must name for the installed MPI; empty where that is not known."""
    has_mpi_package: bool = False
    """Whether that MPI came as a Python package, in place of the one of the site."""
    default_pmi: str = ""
    """What srun takes without ``--mpi``, MpiDefault of Slurm; empty where that is not known."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script will find set."""
    directory: Path | None = None
    """Where sbatch is called, so where relative names begin; None reads no other file."""
    made: Path | None = None  # a folder that will be there when the job begins


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """One ``srun``."""

    line: int
    options: Options
    programs: tuple[Command, ...]
    """What each task runs: one program, or those of ``bash -c "..."``."""
    is_complete: bool  # whether all options are known
    num_tasks: int | None  # None where that is not known
    environ: Mapping[str, str]  # variables that the script sets for it, as far as known
    does_own_launching: bool  # whether it runs torchrun or one of its kind, as far as can be seen

    @property
    def are_ranks(self) -> bool:
        """Whether its tasks wait for each other."""
        return self.num_tasks != 1 and (not self.programs or any(map(is_rank, self.programs)))

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


class BatchScript:
    """A batch script, read once."""

    def __init__(self, text: str, facts: LintFacts) -> None:
        """Read a script, and the files it sources where ``facts`` say where they are."""
        self.text = text
        self.facts = facts
        self.options, self.late = _directives(text)
        """Of the ``#SBATCH`` lines, by long name; and lines that sbatch does not read."""
        is_comment = re.compile(r"#\s+SBATCH\s+-").match
        self.commented = [at for at, line in enumerate(text.splitlines(), 1) if is_comment(line)]
        environ = {k: v for k, v in facts.environ.items() if not k.startswith("SLURM")}
        pairs = (pair.partition("=") for pair in self.options.get("export", "").split(","))
        environ |= {name: value for name, equals, value in pairs if equals}
        by_slurm = {name: self.options.get(option) for name, option in _BY_SLURM.items()}
        environ |= {name: value for name, value in by_slurm.items() if value}
        self.shell = ShellScript(text, given=environ, directory=facts.directory)
        self.commands = self.shell.commands
        self.steps = [
            self._step(command)
            for command in self.commands
            if command.name == "srun" and len(command.words) > 1
        ]
        self.launchers = [each for each in self.commands if launcher_of(each)]

    @property
    def rank_steps(self) -> list[ScriptStep]:
        """Steps whose tasks are ranks."""
        return [step for step in self.steps if step.are_ranks]

    @property
    def requeues(self) -> list[int]:
        """Lines that queue the job again."""
        return [c.line for c in self.commands if c.name == "scontrol" and "requeue" in c.words]

    @property
    def is_requeued(self) -> bool:
        """Whether the job is meant to be queued again."""
        return "requeue" in self.options or bool(self.requeues)

    def number(self, name: str) -> int | None:
        """Return the value of an option of sbatch; None where it is not one whole number."""
        return number(self.options, name)

    @property
    def num_tasks(self) -> int | None:
        """Tasks of the job; None where they are not known."""
        if (whole := self.number("ntasks")) is not None:
            return whole
        per_node, nodes = self.number("ntasks-per-node"), self.number("nodes")
        return None if per_node is None or nodes is None else per_node * nodes

    def _step(self, command: Command) -> ScriptStep:
        options, rest, is_complete = parse(command.words[1:])
        around = {name: self.shell.get(name) or "" for name in self.shell.values}
        programs = tuple(self._programs(command.line, rest))
        return ScriptStep(
            command.line,
            options,
            programs,
            is_complete,
            self._tasks_of(options),
            {**self.shell.given, **around, **command.environ},
            self._launches(programs),
        )

    def _launches(self, programs: Sequence[Command]) -> bool:
        words = [word or UNKNOWN for program in programs for word in program.words]
        if any(word.rpartition("/")[2] in OWN_LAUNCHERS for word in words):
            return True
        if any(program.name and is_rank(program) for program in programs):
            return False
        code = re.sub(r"(^|\s)#.*", "", self.text)  # in a variable whose value is not known
        return re.search(rf"\b({'|'.join(map(re.escape, OWN_LAUNCHERS))})\b", code) is not None

    def _tasks_of(self, options: Options) -> int | None:
        if "ntasks" in options:
            return number(options, "ntasks")
        if (own := number(options, "ntasks-per-node")) is not None:
            nodes = number(options, "nodes") or self.number("nodes")
            return None if nodes is None else own * nodes
        return 1 if "pty" in options else self.num_tasks

    def _programs(self, line: int, words: tuple[str | None, ...]) -> Iterator[Command]:
        program = Command(line, tuple(behind_wrappers(words)), {})
        for flag, text in pairwise(program.words[1:]):
            if program.name in SHELLS and flag and re.fullmatch(r"-\w*c", flag):
                yield from self.shell.inner(text or "")
                at = program.words.index(text) + 2  # behind the name that the shell gets
                words = program.words[at:] if '"$@"' in (text or "") else ()
                break
        else:
            words = program.words
        if words:
            yield Command(line, tuple(behind_wrappers(words)), {})


def number(options: Options, name: str) -> int | None:
    """Return the value of an option; None where it is not one whole number."""
    text = options.get(name) or ""
    return int(text) if text.isdigit() else None


def launcher_of(command: Command) -> str:
    """Return the launcher of ranks that a command is; empty for others, and without arguments."""
    if command.name in MPIRUNS and len(command.words) > 1:
        return command.name
    is_ours = command.name == "hpctrain" and command.words[1:2] == ("launch",)
    return "hpctrain launch" if is_ours else ""


def is_rank(command: Command) -> bool:
    """Say whether a command may be one whose processes wait for each other."""
    if command.name in _UTILITIES or command.name in MPIRUNS:
        return False
    known = [word or "" for word in command.words]
    if re.fullmatch(r"python[\d.]*", command.name) and known[1:2] == ["-m"]:
        return known[2:3] == [] or known[2] not in _TOOLS_OF_PYTHON
    return True


def _directives(text: str) -> tuple[dict[str, str], list[int]]:
    options: dict[str, str] = {}
    late: list[int] = []
    is_over = is_other = False
    for at, line in enumerate(text.splitlines(), 1):
        is_over = is_over or bool(line.strip() and not line.lstrip().startswith("#"))
        if not line.startswith("#SBATCH"):
            continue
        if is_over:
            late.append(at)
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:  # an open quote
            words = line.split()[1:]
        found, rest, _ = parse(words, is_sbatch=True)
        is_other = is_other or bool({"hetjob", "packjob"} & {*rest})
        if not is_other:  # what follows is another part of a heterogeneous job
            options |= {name: value or "" for name, value in found.items()}
    return options, late


def parse(
    words: Sequence[str | None], *, is_sbatch: bool = False
) -> tuple[Options, tuple[str | None, ...], bool]:
    """Split the words behind ``srun`` or ``#SBATCH`` into options and the program behind them.

    The last value is False where a word is not known, so that more options may hide there.

    None stands for words that are not known. ``--wait`` is a flag of sbatch, and takes a value of
    srun. Source: ``sbatch --help`` and ``srun --help`` of Slurm 22.05, and the manual of 24.11.
    """
    flags = FLAGS | {"wait"} if is_sbatch else FLAGS
    options: dict[str, str | None] = {}
    is_complete = True
    at = 0
    while at < len(words):
        word = words[at]
        if word is None:
            is_complete = False
        elif word == "--":
            at += 1
            break
        elif not word.startswith("-") or word == "-":
            break
        else:
            name, value = _split(word, flags, options)
            if value is None and name not in flags | OPTIONAL:
                at += 1
                options[name] = words[at] if at < len(words) else ""
            else:
                options[name] = value or ""
        at += 1
    return options, tuple(words[at:]), is_complete


def _split(
    word: str, flags: frozenset[str], options: dict[str, str | None]
) -> tuple[str, str | None]:
    """Return the last option of a word and its value, None for no value; keep flags before it."""
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        return ALIASES.get(name, name), text if equals else None
    letters = word[1:]
    while (name := SHORT.get(letters[0], letters[0])) in flags and len(letters) > 1:
        options[name] = ""
        letters = letters[1:]
    return name, letters[1:].removeprefix("=") or None
