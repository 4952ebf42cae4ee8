"""Site profiles: facts that a computing centre documents about a machine, as TOML files."""

import fnmatch
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.core.errors import ConfigError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.python_compat import Traversable, tomllib

VERSION, READER = 1, "1.0"  # of the format, and the oldest hpctrain that reads this version

OWN = Path("slurm", "site.toml")
"""Profile of the user; in the directory of submission it has priority over recognized sites."""

NONE = "none"  # value of ``--site`` that selects no profile

_BIND = "--cpu-bind=cores"
_PLACE = "# Modules and environment of your site;"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteNode:
    """A compute node; 0 and empty values are unknown."""

    cpus: int = 0  # CPUs that a job may use, in the unit of ``--cpus-per-task``
    gpus: int = 0
    numa_domains: int = 0
    adapters: int = 0  # fast network adapters
    network: str = ""  # ``slingshot`` or ``infiniband``
    gpu_cores: tuple[str, ...] = ()  # cores next to each GPU, such as ``49-55``, by GPU number

    def cpu_mask(self) -> str:
        """Return the ``--cpu-bind`` that binds each rank next to the GPU with its local rank."""
        masks = []
        for text in self.gpu_cores:
            first, _, last = text.partition("-")
            masks.append(f"{sum(1 << core for core in range(int(first), int(last) + 1)):x}")
        return f"mask_cpu:{','.join(masks)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteJob:
    """Rules for jobs of a machine, and the environment that its network needs."""

    account: str = ""  # form of the account that each job must name; empty if there is a default
    partition: str = ""
    options: tuple[str, ...] = ()  # further options of sbatch
    cpu_bind: str = "cores"  # value of ``srun --cpu-bind``; empty to omit the option
    srun: tuple[str, ...] = ()  # further options of srun
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # expanded by the shell
    scratch: tuple[str, ...] = ()  # directories for runs and data


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteProfile:
    """Profile of a machine."""

    name: str = ""
    title: str = ""
    recognize: tuple[str, ...] = ()
    """Patterns, one of which must match: ``host=login*.machine`` or ``VARIABLE=value``."""
    node: SiteNode = SiteNode()
    job: SiteJob = SiteJob()
    sources: tuple[str, ...] = ()  # pages of the documentation with their dates

    def lacks_account(self, given: str | None, environ: Mapping[str, str] = os.environ) -> bool:
        """Return True if jobs must name an account, and neither ``given`` nor a variable does."""
        return bool(self.job.account) and not (given or environ.get("SBATCH_ACCOUNT"))

    def matches(self, environ: Mapping[str, str], host: str) -> bool:
        """Return True if the host name or a variable identifies this machine."""
        pairs = (each.partition("=") for each in self.recognize)
        return any(
            fnmatch.fnmatchcase(host if name == "host" else environ.get(name, ""), pattern)
            for name, _, pattern in pairs
        )

    def write_into(self, script: str, *, is_full: bool) -> str:
        """Return a batch script with the modules, variables and options of srun of this site.

        Args:
            script: text of a template with settings.
            is_full: whether the job has all cores of its nodes and one rank per GPU, which is
                then bound to the cores next to its GPU.
        """
        bind = self.node.cpu_mask() if is_full else self.job.cpu_bind
        flags = [*([f"--cpu-bind={bind}"] if bind else []), *self.job.srun]
        script = re.sub(f"{_BIND} ?", " ".join([*flags, ""]) if flags else "", script)
        lines = [f'module is-loaded "{name}" || module load "{name}"' for name in self.job.modules]
        lines += [f'export {name}="{text}"' for name, text in self.job.variables.items()]
        if not lines:
            return script
        text = "\n".join([f"# Profile of the site {self.name} (hpctrain site show).", *lines])
        return script.replace(_PLACE, f"{text}\n\n{_PLACE}", 1)


def names() -> list[str]:
    """List the profiles of the package by name."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir())


def text(name: str) -> str:
    """Return the text of a profile of the package."""
    if name not in names():
        raise ConfigError(
            f"--site must be {NONE}, a TOML file or one of {', '.join(names())}, got {name!r}; "
            f"`hpctrain site init FILE.toml` writes a profile of this machine"
        )
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def find(
    name: str | None = None, environ: Mapping[str, str] = os.environ, host: str | None = None
) -> SiteProfile | None:
    """Return the profile of a name or file, or by default the profile of this machine.

    Without a name, the file ``slurm/site.toml`` has priority over recognized machines. The result
    is None if the machine is unknown.

    Raises:
        ConfigError: no profile has this name, or the file is not a profile.
    """
    if name == NONE:
        return None
    if name is not None and name.endswith(".toml"):
        return _read_file(Path(name))
    if name is not None:
        return parse(text(name), name)
    if OWN.is_file():
        return _read_file(OWN)
    host = socket.gethostname() if host is None else host
    sites = (parse(text(each), each) for each in names())
    return next((each for each in sites if each.matches(environ, host)), None)


def parse(toml: str, origin: str) -> SiteProfile:
    """Return the profile in a TOML text. ``origin`` names the text in errors."""
    try:
        table = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"a site profile must be TOML, but {origin} is not: {error}") from None
    if fault := fault_of(table, VERSION):
        raise ConfigError(f"the site profile {origin} cannot be read: {fault}")
    for key in stamp(VERSION, READER):
        table.pop(key, None)
    return _record(SiteProfile, table, origin)


def _read_file(path: Path) -> SiteProfile:
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a site profile must be readable, but {path} is not: {error}; "
            f"`hpctrain site init {path}` writes one"
        ) from None


def _record(kind: type[T], table: Mapping[str, Any], origin: str) -> T:
    """Return a dataclass with the values of a table; each value has the type of its default."""
    default = kind()
    known = [each.name for each in fields(default)]  # type: ignore[arg-type]
    if wrong := [key for key in table if key not in known]:
        raise ConfigError(
            f"a key of a site profile must be one of {', '.join(known)}, got {wrong[0]!r} in "
            f"{origin}; correct the key"
        )
    return kind(**{key: _value(key, table[key], getattr(default, key), origin) for key in table})


def _value(key: str, given: Any, usual: Any, origin: str) -> Any:
    """Return a value of a profile. Raises ``ConfigError`` unless its type is that of ``usual``."""
    if isinstance(given, dict) and isinstance(usual, SiteNode | SiteJob):
        return _record(type(usual), given, f"{origin}, [{key}]")
    value = tuple(given) if isinstance(given, list) else given
    members = [*value.values()] if isinstance(value, dict) else value
    has_texts = not isinstance(value, dict | tuple) or all(isinstance(e, str) for e in members)
    is_valid = type(value) is type(usual) and has_texts
    if is_valid and key == "gpu_cores":
        is_valid = all(map(_is_range, value))
    elif is_valid and key == "variables":
        is_valid = all(map(_NAME.fullmatch, value)) and not any(map(_UNSAFE.search, members))
    elif is_valid:
        texts = [value] if isinstance(value, str) else members if value != usual else ()
        is_valid = value >= 0 if isinstance(value, int) else not any(map(_COMMAND.search, texts))
    if not is_valid:
        example = _EXAMPLES.get(key, _EXAMPLES.get(type(usual)))
        raise ConfigError(
            f"{key} of a site profile must be {example}, got {given!r} in {origin}; correct the "
            f"value"
        )
    return value


def _is_range(text: str) -> bool:
    first, _, last = text.partition("-")
    return first.isdecimal() and last.isdecimal() and int(first) <= int(last)


_NAME = re.compile(r"[A-Za-z_]\w*")
_UNSAFE = re.compile(r'["`\n]|\$\(')  # ends the quotes of a shell, or starts a command
_COMMAND = re.compile(r"[;&|`\n]|\$\(")

_EXAMPLES: Mapping[object, str] = {
    "gpu_cores": 'a list of one range of cores for each GPU, such as ["0-15", "16-31"]',
    "variables": 'names with texts that contain no quotes and commands, such as A = "1"',
    str: 'a text without commands of a shell, such as "batch"',
    int: "a number of at least 0, such as 4",
    tuple: 'a list of texts without commands of a shell, such as ["$SCRATCH"]',
    SiteNode: "a table",
    SiteJob: "a table",
}


def _folder() -> Traversable:
    return resources.files("hpctrain.launch") / "sites"
