"""Parser of batch scripts: ``#SBATCH`` lines, steps and launchers.

The script is split into words, line by line; it is not run. The value of a word with a ``$`` is
unknown before the run, and no check reports such a word.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from hpctrain.core.finding import Level
from hpctrain.launch.site import SiteProfile

MPIRUNS = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpirun.openmpi", "orterun")
"""Programs that start ranks, in addition to ``hpctrain launch``."""

OWN_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "ray", "torch.distributed.run", "pdsh")
"""Launchers that start several processes in a task, without MPI."""

_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")

_WRAPPERS = frozenset(
    (
        *("if", "then", "else", "elif", "while", "until", "do", "!", "{", "}", "time"),
        *("exec", "nohup", "command", "env", "timeout", "nice", "ionice", "stdbuf", "numactl"),
        *("taskset", "builtin", "setsid", "export", "declare"),
    )
)
"""Words before a command: keywords of the shell, and programs that start another program."""

_WRAPPER_WORD = re.compile(r"-.*|\d+[smhd]?|0x\w+", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(\[.*?\])?(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::?[-=?][^{}]*)?\}")
_HEREDOC = re.compile(r"(?<!<)<<-?\s*['\"]?(\w+)")
_MAX_QUOTED_LINES = 60
_HARMLESS = re.compile(r"(/activate|/etc/.*|.*/init/\w+|.*/profile\.d/.*|.*\.bashrc)$")
"""Files that set variables and start nothing."""

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
"""Programs whose tasks do not wait for each other, unlike the ranks of an MPI program."""

_TOOLS_OF_PYTHON = ("pip", "venv", "zipfile", "tarfile", "compileall", "ensurepip")

SHORT = {
    "A": "account",
    "C": "constraint",
    "c": "cpus-per-task",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "K": "kill-on-bad-exit",
    "k": "no-kill",
    "M": "clusters",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "W": "wait",
}
"""Long names of the one-letter options that checks read; other options keep their letter."""

ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks"}
"""Other names of options that Slurm accepts."""

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
"""Options whose value, if any, follows without a space: ``--nice=5``, ``-K0``."""


Fault = tuple[Level, str, str]  # level, finding and remedy

Options = Mapping[str, str]
"""Values of options by long name; empty for a flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFacts:
    """Facts about the machine; checks whose facts are unknown are skipped."""

    needed_pmi: str = ""
    """Value of ``srun --mpi=`` for the installed MPI; empty if unknown."""
    has_mpi_package: bool = False
    """Whether the installed MPI is a Python package, not the MPI of the site."""
    default_pmi: str = ""
    """MpiDefault of Slurm, which srun uses without ``--mpi``; empty if unknown."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the script."""
    directory: Path | None = None
    """Directory in which sbatch is called, for relative names; None if no other file is read."""
    made: Path | None = None  # a folder that exists before the job starts
    site: SiteProfile | None = None  # profile of the site, for the rules of its jobs


@dataclass(frozen=True, slots=True)
class Command:
    """Simple command of a script, without wrappers such as ``timeout 60`` and ``env X=1``."""

    line: int
    words: tuple[str, ...]
    environ: Mapping[str, str]  # variables set before the command, or by an assignment
    is_background: bool = False

    @property
    def name(self) -> str:
        """Name of the program, without its folder; empty if it contains a variable."""
        return "" if not self.words or "$" in self.words[0] else self.words[0].rpartition("/")[2]

    @property
    def inner(self) -> list["Command"]:
        """Commands in the text of ``bash -c "..."``, and the command passed as ``"$@"``."""
        for at, (flag, text) in enumerate(pairwise(self.words[1:]), 2):
            if self.name in _SHELLS and re.fullmatch(r"-\w*c", flag):
                after = self.words[at + 2 :] if '"$@"' in text or text.startswith("$") else ()
                more = [_command(self.line, after)] if after else []
                return [*commands(text, self.line), *more]
        return []


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """Call of ``srun`` in a batch script."""

    line: int
    options: Options
    programs: tuple[Command, ...]
    """Programs of each task: one, or all commands of ``bash -c "..."``."""
    is_complete: bool  # whether all options are known
    num_tasks: int | None  # None if unknown
    environ: Mapping[str, str]  # variables that the script sets for the step
    does_own_launching: bool  # whether the step runs torchrun or a similar launcher

    @property
    def are_ranks(self) -> bool:
        """True if the tasks of this step wait for each other, as ranks do."""
        return self.num_tasks != 1 and (not self.programs or any(map(is_rank, self.programs)))

    def option(self, name: str, variable: str) -> str | None:
        """Return the value of an option, or of its variable, or None if neither is set.

        A value that is unknown before the run contains a ``$``.
        """
        if name in self.options:
            return self.options[name]
        return self.environ.get(variable, None if self.is_complete else "$")


class BatchScript:
    """Batch script, split into directives, commands and steps.

    Args:
        text: the script.
        facts: facts about the machine.
    """

    def __init__(self, text: str, facts: LintFacts) -> None:
        self.text = text
        self.facts = facts
        self.options, self.late, self.components = _directives(text)
        """Options of the ``#SBATCH`` lines by long name; line numbers of ``#SBATCH`` lines that
        sbatch ignores; line numbers where further components of a heterogeneous job begin."""
        is_comment = re.compile(r"#\s+SBATCH\s+-").match
        self.commented = [at for at, line in enumerate(text.splitlines(), 1) if is_comment(line)]
        found = [*commands(text)]
        exported = (pair.partition("=") for pair in self.options.get("export", "").split(","))
        self.environ = {k: v for k, v in facts.environ.items() if not k.startswith("SLURM")}
        self.environ |= {name: value for name, equals, value in exported if equals}
        first: dict[str, str] = {}
        self.assigned: dict[str, int] = {}
        """For each variable, the line number of its last assignment."""
        self._known = dict(self.environ)
        """Values of variables; ``$`` for a variable that is set to two values."""
        for command in found:
            own = {name: self._expanded(value) for name, value in command.environ.items()}
            if not command.words:
                self.environ |= own
                self.assigned |= dict.fromkeys(own, command.line)
            for name, value in own.items():
                is_other = name in first and first[name] != value
                first[name] = value
                self._known[name] = "$" if is_other else value
        found = [replace(c, words=tuple(map(self._expanded, c.words))) for c in found]
        self.commands = [*found, *(each for command in found for each in command.inner)]
        self.launchers = [each for each in self.commands if launcher_of(each)]

    def _expanded(self, word: str) -> str:
        """Replace each variable in ``word`` if its value is known and is a single word."""

        def value(match: re.Match[str]) -> str:
            known = self._known.get(match[1] or match[2], "")
            return match[0] if re.search(r"\s|\$|^$", known) else known

        return _VARIABLE.sub(value, word)

    @cached_property
    def code(self) -> str:
        """The text without its comments."""
        return re.sub(r"(^|\s)#.*", "", self.text)

    @cached_property
    def has_unread_sources(self) -> bool:
        """True if the script sources a file that may start ranks or set a trap."""
        sourced = (each.words[1:2] for each in self.commands if each.name in ("source", "."))
        return not all(words and _HARMLESS.search(words[0]) for words in sourced)

    @cached_property
    def steps(self) -> list[ScriptStep]:
        """All calls of ``srun``."""
        found = (each for each in self.commands if each.name == "srun" and len(each.words) > 1)
        return [self._step(each) for each in found]

    @property
    def rank_steps(self) -> list[ScriptStep]:
        """Steps whose tasks are ranks."""
        return [step for step in self.steps if step.are_ranks]

    @cached_property
    def requeues(self) -> list[int]:
        """Line numbers of the calls of ``scontrol requeue``."""
        lines = enumerate(self.text.splitlines(), 1)
        return [at for at, line in lines if re.match(r"[^#]*\bscontrol\s+requeue\b", line)]

    @property
    def is_requeued(self) -> bool:
        """True if the job may be queued again."""
        return "requeue" in self.options or bool(self.requeues)

    def number(self, name: str) -> int | None:
        """Return the value of an option of sbatch, or None if it is not an integer."""
        return number(self.options, name)

    @property
    def num_tasks(self) -> int | None:
        """Tasks of the job, or None if unknown."""
        if (whole := self.number("ntasks")) is not None:
            return whole
        per_node, nodes = self.number("ntasks-per-node"), self.number("nodes")
        return None if per_node is None or nodes is None else per_node * nodes

    def _step(self, command: Command) -> ScriptStep:
        options, words, is_complete = parse(command.words[1:])
        program = _command(command.line, words)
        programs = tuple(program.inner or ([program] if words else ()))
        return ScriptStep(
            command.line,
            options,
            programs,
            is_complete,
            self._tasks_of(options),
            {**self.environ, **command.environ},
            self._launches(programs),
        )

    def _launches(self, programs: Sequence[Command]) -> bool:
        words = [word.rpartition("/")[2] for program in programs for word in program.words]
        if any(word in OWN_LAUNCHERS for word in words):
            return True
        if any(program.name and is_rank(program) for program in programs):
            return False
        pattern = rf"\b({'|'.join(map(re.escape, OWN_LAUNCHERS))})\b"
        return re.search(pattern, self.code) is not None  # a variable may contain the name

    def _tasks_of(self, options: Options) -> int | None:
        if "ntasks" in options:
            return number(options, "ntasks")
        if (own := number(options, "ntasks-per-node")) is not None:
            nodes = number(options, "nodes") or self.number("nodes")
            return None if nodes is None else own * nodes
        return 1 if "pty" in options else self.num_tasks


def number(options: Options, name: str) -> int | None:
    """Return the value of an option, or None if it is not an integer."""
    text = options.get(name, "")
    return int(text) if text.isdigit() else None


def launcher_of(command: Command) -> str:
    """Return the launcher that a command runs, such as ``mpirun``; empty if it runs none."""
    if command.name in MPIRUNS and len(command.words) > 1:
        return command.name
    is_ours = command.name == "hpctrain" and command.words[1:2] == ("launch",)
    return "hpctrain launch" if is_ours else ""


def is_rank(command: Command) -> bool:
    """Return True if the processes of a command may be ranks, which wait for each other."""
    if command.name in _UTILITIES or command.name in MPIRUNS or not command.words:
        return False
    if re.fullmatch(r"python[\d.]*", command.name) and command.words[1:2] == ("-m",):
        return command.words[2:3] == () or command.words[2] not in _TOOLS_OF_PYTHON
    return True


def commands(text: str, first_line: int = 1) -> Iterator[Command]:
    """Split a script into simple commands; variables and functions are not expanded."""
    for line, words in _logical_lines(text, first_line):
        start = 0
        for at, word in enumerate([*words, ";"]):
            if not re.fullmatch(r"[();|&<>]*[();|&]", word) or ">" in word:
                continue
            found = _command(line, words[start:at], is_background=word[-1:] == "&" != word[-2:-1])
            is_array = start > 1 and words[start - 1] == "(" and words[start - 2].endswith("=")
            if (found.words or found.environ) and not is_array:
                yield found
            start = at + 1


def _logical_lines(text: str, first_line: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of each logical line; a backslash or open quote joins lines."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        for end in range(at + 1, min(len(lines), at + _MAX_QUOTED_LINES) + 1):
            if end < len(lines) and lines[end - 1].endswith("\\"):
                continue
            words = _split_words(re.sub(r"\\\n", "", "\n".join(lines[at:end])))
            if words is not None:
                break
        else:
            words, end = [], at + 1
        yield first_line + at, words
        if heredoc := _HEREDOC.search(lines[at]):
            end = next(
                (k + 1 for k in range(end, len(lines)) if lines[k].strip() == heredoc[1]), end
            )
        at = end


def _split_words(text: str) -> list[str] | None:
    """Split a text as a shell does; replace substitutions by ``$_``. None if a quote is open."""
    text = re.sub(r"\$\((?:which|command -v|type -p) ([\w.+-]+)\)", r"\1", text)
    text = re.sub(r"\$\(\([^()]*\)\)|`[^`]*`", "$_", text)
    text = re.sub(r"\$\{(\w+:?[-=?])[^{}]*\s[^{}]*\}", r"${\1}", text)
    while (shorter := re.sub(r"\$\([^()]*\)|\$\{[^{}]*\s[^{}]*\}", "$_", text)) != text:
        text = shorter
    for candidate in (text, re.sub(r"(^|\s)#.*", "", text)):
        lexer = shlex.shlex(candidate, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = [*lexer]
        except ValueError:
            continue
        comment = next((at for at, word in enumerate(words) if word.startswith("#")), len(words))
        return words[:comment]
    return None


def _command(line: int, words: Sequence[str], *, is_background: bool = False) -> Command:
    """Return the command in ``words``, without redirections, assignments and wrappers."""
    environ: dict[str, str] = {}
    redirected = [at for at, word in enumerate(words) if re.fullmatch(r"[<>&|]+", word)]
    rest = [word for at, word in enumerate(words) if not {at, at - 1} & {*redirected}]
    at, is_wrapped = 0, False
    while at < len(rest):
        if match := _ASSIGNMENT.fullmatch(rest[at]):
            environ[match[1]] = "$" if match[3] else match[4]
        elif rest[at] in _WRAPPERS:
            is_wrapped = True
        elif not (is_wrapped and _WRAPPER_WORD.fullmatch(rest[at])):
            break
        at += 1
    return Command(line, tuple(rest[at:]), environ, is_background)


def _directives(text: str) -> tuple[dict[str, str], list[int], list[int]]:
    options: dict[str, str] = {}
    late: list[int] = []
    components: list[int] = []
    is_after_command = False
    for at, line in enumerate(text.splitlines(), 1):
        is_after_command = is_after_command or bool(
            line.strip() and not line.lstrip().startswith("#")
        )
        if not line.startswith("#SBATCH"):
            continue
        if is_after_command:
            late.append(at)
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:  # an open quote
            words = line.split()[1:]
        found, rest, _ = parse(words, is_sbatch=True)
        if {"hetjob", "packjob"} & {*rest}:
            components.append(at)
        if not components:  # options of other parts of a heterogeneous job are ignored
            options |= found
    return options, late, components


def parse(
    words: Sequence[str], *, is_sbatch: bool = False
) -> tuple[Options, tuple[str, ...], bool]:
    """Split the words after ``srun`` or ``#SBATCH`` into options and the program after them.

    The option ``--wait`` has no value for sbatch, but has a value for srun.

    Returns:
        The options, the words of the program, and whether all words are known: unknown words may
        contain more options.

    Source: ``sbatch --help`` and ``srun --help`` of Slurm 22.05, and the manual of 24.11.
    """
    flags = FLAGS | {"wait"} if is_sbatch else FLAGS
    options: dict[str, str] = {}
    is_complete = True
    at = 0
    while at < len(words):
        word = words[at]
        if not is_sbatch and re.match(r"\$[\w@*{]", word):
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


def _split(word: str, flags: frozenset[str], options: dict[str, str]) -> tuple[str, str | None]:
    """Return the last option in ``word`` and its value; store earlier flags in ``options``."""
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        return ALIASES.get(name, name), text if equals else None
    letters = word[1:]
    while (name := SHORT.get(letters[0], letters[0])) in flags and len(letters) > 1:
        options[name] = ""
        letters = letters[1:]
    return name, letters[1:].removeprefix("=") or None
