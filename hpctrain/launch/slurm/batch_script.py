"""Batch scripts for Slurm: templates that come with the package, as they are or with settings."""

import re
import shlex
from dataclasses import dataclass
from importlib import resources

from hpctrain.cluster.env import EXIT_CODE_FILE, STOPPING
from hpctrain.core.errors import ConfigError
from hpctrain.core.python_compat import Traversable
from hpctrain.launch.slurm.scheduler import time_limit_s

SUFFIX = ".sbatch"


_CONFIG = re.compile(r"^config=.*$", re.MULTILINE)
_DIRECTORY = re.compile(r"^directory=.*$", re.MULTILINE)
_TRAIN = re.compile(
    r'(hpctrain|"\$\{hpctrain\[@\]\}") train "\$config".*?(?="(\$@|\$\{options\[@\]\})")',
    re.DOTALL,
)
"""What a template starts on the ranks, up to the words behind the script."""
_JUDGED = re.compile(r"^( *)(?=# The run's own last record)", re.MULTILINE)
_AGAIN = re.compile(r'echo "to go on: .*"')
_OPPOSITE = {"--requeue": "--no-requeue", "--no-requeue": "--requeue"}
_OPTION = re.compile(r"^#SBATCH (--[a-z-]+).*$")


_PLAIN = (
    *(
        "job_name",
        "partition",
        "account",
        "nodes",
        "tasks_per_node",
        "cpus_per_task",
        "mem",
        "time",
    ),
    *("gpus_per_node", "output", "array", "dependency"),
)
"""Settings that are options of sbatch with a value, in the order of the script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """What a user says about a job; None leaves the template's line as it is."""

    job_name: str | None = None
    """Name of the job, and first part of its output and its run directory."""
    partition: str | None = None  # partition, or several with commas between
    account: str | None = None  # whom to charge
    nodes: int | None = None  # how many nodes
    tasks_per_node: int | None = None  # ranks on each node
    cpus_per_task: int | None = None  # cores of each rank
    mem: str | None = None  # memory on each node, such as ``64G``; ``0`` is all of it
    time: str | None = None  # time limit as Slurm writes it, such as ``01:30:00``
    gpus_per_node: int | None = None  # GPUs on each node
    output: str | None = None  # file of the job's output, with Slurm's patterns such as ``%j``
    array: str | None = None  # indices of a job array, such as ``0-7%2``
    dependency: str | None = None
    """When the job may start, such as ``afterok:123``; one that never can is cancelled."""
    requeue: bool | None = None  # whether Slurm may queue the job again
    config: str | None = None
    """The TOML file to train; else what the variable CONFIG of the job says."""
    directory: str | None = None
    """The run's folder, in which Slurm's variables such as ``$SLURM_ARRAY_TASK_ID`` count; else
    what the variable RUN_DIRECTORY says, or one named after the job."""
    program: tuple[str, ...] = ()
    """What runs in place of ``hpctrain train``: a command, in whose words Slurm's variables count.
    It finds the run's folder in RUN_DIRECTORY; its exit code is kept there."""
    overrides: tuple[str, ...] = ()
    """``KEY=VALUE`` for ``hpctrain train --set``, one each; Slurm's variables count."""
    extra: tuple[str, ...] = ()  # further options of sbatch, such as ``--qos=high``, one each

    def options(self) -> dict[str, str]:
        """Return the line of each option that is set, by the option's name."""
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in _PLAIN}
        values["--ntasks-per-node"] = values.pop("--tasks-per-node")
        if self.dependency:
            values["--kill-on-invalid-dep"] = "yes"
        found = {name: f"{name}={_word(name, v)}" for name, v in values.items() if v is not None}
        if self.requeue is not None:
            name = "--requeue" if self.requeue else "--no-requeue"
            found[name] = name
        for option in self.extra:
            if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option):
                raise ConfigError(
                    f"a further option of sbatch is --name or --name=value, got {option!r}"
                )
            name, mark, value = option.partition("=")
            found[name] = f"{name}={_word(name, value)}" if mark else name
        return found


def names() -> list[str]:
    """List the templates by name, in alphabetical order."""
    found = (file.name for file in _folder().iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))


def text(name: str) -> str:
    """Return a template, byte for byte as the package has it."""
    if name not in names():
        raise ConfigError(f'there is no template "{name}"; there are {", ".join(names())}')
    return (_folder() / f"{name}{SUFFIX}").read_text(encoding="utf-8")


def script(name: str, settings: BatchSettings) -> str:
    """Return a template in which the lines of sbatch say what ``settings`` say.

    An option that the template has is replaced in its place; others follow the last one. Raises
    ``ConfigError``: there is no template of this name, or a setting cannot stand in a script.
    """
    options = settings.options()
    lines = [_in_time(line, settings.time) for line in text(name).splitlines()]
    opposites = {_OPPOSITE[option] for option in options if option in _OPPOSITE}
    written = []
    for line in lines:
        option = match[1] if (match := _OPTION.match(line)) else ""
        if option not in opposites:
            written.append(f"#SBATCH {options.pop(option)}" if option in options else line)
    last = max(number for number, line in enumerate(written, 1) if line.startswith("#SBATCH "))
    written[last:last] = [f"#SBATCH {line}" for line in options.values()]
    whole = "\n".join(written) + "\n"
    words = [_quoted(f"--set={override}") for override in settings.overrides]
    before = f'set -- {" ".join(words)} "$@"\n' if words else ""
    config = "" if settings.config is None else f"config={shlex.quote(settings.config)}"
    whole = _CONFIG.sub(lambda found: before + (config or found[0]), whole, count=1)
    if settings.directory is not None:
        line = f"directory={_quoted(settings.directory)}"
        whole = _DIRECTORY.sub(lambda _: line, whole, count=1)
    if settings.directory is not None or settings.program:
        whole = _AGAIN.sub('echo "to go on: the same hpctrain submit again"', whole)
    return _starting(whole, settings.program) if settings.program else whole


def _starting(whole: str, program: tuple[str, ...]) -> str:
    """Let a script that trains start a program in its place, and keep how that has ended."""
    words = " ".join(_quoted(word) if "$" in word else shlex.quote(word) for word in program)
    whole = _CONFIG.sub(lambda _: f"program=({words})", whole, count=1)
    begin = (
        f'mkdir -p "$directory" && rm -f "$directory/{STOPPING}"\n'
        f'echo begun >"$directory/{EXIT_CODE_FILE}"\nexport RUN_DIRECTORY=$directory'
    )
    whole = _DIRECTORY.sub(lambda found: f"{found[0]}\n{begin}", whole, count=1)
    whole = _TRAIN.sub('"${program[@]}" ', whole)
    whole = _JUDGED.sub(rf'\1echo "$code" >"$directory/{EXIT_CODE_FILE}"\n\1', whole)
    return re.sub(r"CONFIG=\$config[ ,]", "", whole)


def _folder() -> Traversable:
    return resources.files("hpctrain.launch") / "templates"


def _in_time(line: str, limit: str | None) -> str:
    """Let a signal come at the earliest when three quarters of a job's time are over."""
    signal, mark, margin_s = line.partition("USR1@")
    limit_s = time_limit_s(limit or "")
    if not mark or limit_s is None or not line.startswith("#SBATCH --signal="):
        return line
    return f"{signal}{mark}{min(int(margin_s), int(limit_s // 4))}"


def _word(name: str, value: str | int) -> str:
    """Return a value as sbatch reads it in a line of a script; quotes keep blanks together."""
    text = str(value)
    if not text or not text.isprintable() or '"' in text or "\\" in text:
        raise ConfigError(
            f'{name} is one line without " and \\, and not empty, got {text!r}; '
            f"sbatch could not read it in a script"
        )
    return f'"{text}"' if re.search(r"[\s#;'$`]", text) else text


def _quoted(text: str) -> str:
    """Quote for a shell that is to put in the values of variables."""
    return '"' + re.sub(r'(["\\`])', r"\\\1", text) + '"'
