"""Batch scripts for Slurm: templates of the package, unchanged or with settings."""

import re
import shlex
from dataclasses import dataclass, fields
from importlib import resources

from hpctrain.cluster.env import EXIT_CODE_FILE, STOPPING
from hpctrain.core.errors import ConfigError
from hpctrain.core.python_compat import Traversable
from hpctrain.launch.slurm.scheduler import CLUSTERS, time_limit_s

SUFFIX = ".sbatch"


_CONFIG = re.compile(r"^config=.*$", re.MULTILINE)
_DIRECTORY = re.compile(r"^directory=.*$", re.MULTILINE)
_TRAIN = re.compile(
    r'(hpctrain|"\$\{hpctrain\[@\]\}") train "\$config".*?(?="(\$@|\$\{options\[@\]\})")',
    re.DOTALL,
)
"""Matches the command that a template starts on the ranks, without the script arguments."""
_JUDGED = re.compile(r"^( *)(?=# The last record of the run)", re.MULTILINE)
_AGAIN = re.compile(r'echo "to continue: .*"')
_OPPOSITE = {"--requeue": "--no-requeue", "--no-requeue": "--requeue"}
_OPTION = re.compile(r"^#SBATCH (--[a-z-]+).*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class SbatchOptions:
    """Options of sbatch; None keeps the directive of the template."""

    job_name: str | None = None
    """Name of the job, and prefix of its output and its run directory."""
    partition: str | None = None  # one partition, or several with commas
    account: str | None = None
    nodes: int | None = None
    ntasks_per_node: int | None = None  # ranks on each node
    cpus_per_task: int | None = None  # CPUs of each rank
    mem: str | None = None  # memory on each node, such as ``64G``; ``0`` is all memory
    time: str | None = None  # time limit in the format of Slurm, such as ``01:30:00``
    gpus_per_node: int | None = None
    output: str | None = None  # output file, with patterns of Slurm such as ``%j``
    array: str | None = None  # indices of a job array, such as ``0-7%2``
    dependency: str | None = None
    """Condition for the start, such as ``afterok:123``; Slurm cancels a job that cannot start."""
    requeue: bool | None = None  # whether Slurm may queue the job again
    extra: tuple[str, ...] = ()  # further options of sbatch, such as ``--qos=high``

    def lines(self) -> dict[str, str]:
        """Return the text after #SBATCH for each option that is set, by name of the option."""
        plain = [each.name for each in fields(SbatchOptions)][:-2]
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in plain}
        if self.dependency:
            values["--kill-on-invalid-dep"] = "yes"
        found = {name: f"{name}={_word(name, v)}" for name, v in values.items() if v is not None}
        if self.requeue is not None:
            name = "--requeue" if self.requeue else "--no-requeue"
            found[name] = name
        for option in self.extra:
            if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option):
                raise ConfigError(
                    f"an additional option of sbatch must be --name or --name=value, got "
                    f"{option!r}; for example, write --qos=high"
                )
            name, mark, value = option.partition("=")
            if name == "--clusters":
                raise ConfigError(
                    f"the cluster of a job must be selected for all Slurm commands, got {option}, "
                    f"which only sbatch reads; omit this option, and `export {CLUSTERS}=NAME`, "
                    f"which all Slurm commands read"
                )
            found[name] = f"{name}={_word(name, value)}" if mark else name
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings(SbatchOptions):
    """Options of sbatch, and the command that the job runs."""

    config: str | None = None
    """TOML file of the training; by default the value of the job's variable CONFIG."""
    directory: str | None = None
    """Folder of the run; may contain variables of Slurm such as ``$SLURM_ARRAY_TASK_ID``.

    By default the value of the variable RUN_DIRECTORY, or a folder named after the job.
    """
    program: tuple[str, ...] = ()
    """Command that runs instead of ``hpctrain train``; may contain variables of Slurm.

    RUN_DIRECTORY is the folder of the run, where the exit code is stored.
    """
    overrides: tuple[str, ...] = ()
    """``KEY=VALUE`` for ``hpctrain train --set``; may contain variables of Slurm."""


def names() -> list[str]:
    """List the templates by name, in alphabetical order."""
    found = (file.name for file in _folder().iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))


def text(name: str) -> str:
    """Return the unchanged text of a template."""
    if name not in names():
        raise ConfigError(f"a template must be one of {', '.join(names())}, got {name!r}")
    return (_folder() / f"{name}{SUFFIX}").read_text(encoding="utf-8")


def option(name: str, option: str) -> str:
    """Return the value of an option of sbatch in a template; empty if the template lacks it."""
    found = re.search(f"^#SBATCH {option}=(.*)$", text(name), re.MULTILINE)
    return found[1] if found else ""


def script(name: str, settings: BatchSettings) -> str:
    """Return the text of a template with the given settings.

    A setting replaces the same option of the template. Options that the template lacks are added
    after the last directive.

    Args:
        name: name of the template.
        settings: options of sbatch, and the command of the job.

    Raises:
        ConfigError: no template has this name, or a setting cannot be written into a script.
    """
    options = settings.lines()
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
        whole = _AGAIN.sub('echo "to continue: the same hpctrain submit again"', whole)
    return _starting(whole, settings.program) if settings.program else whole


def _starting(whole: str, program: tuple[str, ...]) -> str:
    """Make a script run ``program`` instead of ``hpctrain train`` and store the exit code."""
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
    """Limit the lead time in a ``--signal`` line to a quarter of ``limit``, the job's time limit.

    Other lines are returned unchanged.
    """
    signal, mark, margin_s = line.partition("USR1@")
    limit_s = time_limit_s(limit or "")
    if not mark or limit_s is None or not line.startswith("#SBATCH --signal="):
        return line
    return f"{signal}{mark}{min(int(margin_s), int(limit_s // 4))}"


def _word(name: str, value: str | int) -> str:
    """Return a value in the syntax of a #SBATCH line, with quotes if it contains blanks."""
    text = str(value)
    if not text or not text.isprintable() or '"' in text or "\\" in text:
        raise ConfigError(
            f'{name} must be one line without " and \\, and not empty, because sbatch cannot '
            f"read other values in a script, got {text!r}; change the value"
        )
    return f'"{text}"' if re.search(r"[\s#;'$`]", text) else text


def _quoted(text: str) -> str:
    """Quote a text for the shell, which then expands only variables."""
    return '"' + re.sub(r'(["\\`])', r"\\\1", text) + '"'
