"""Site profiles: facts that a computing centre documents about a machine, as TOML files."""

import fnmatch
import math
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpctrain.core.checks import CheckedFields, Count, Texts, require
from hpctrain.core.errors import ConfigError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.python_compat import Traversable
from hpctrain.core.toml_values import TomlValues, read_toml
from hpctrain.core.units import parse_numbers
from hpctrain.launch.slurm.scheduler import megabytes

VERSION = 1
STAMP = stamp(VERSION, "1.0")
"""First entries of a profile: version of the format, and the oldest hpctrain that reads it."""

OWN = Path("slurm", "site.toml")
"""File of the user's profile, in the working directory; used instead of a recognized site."""

NONE = "none"  # value of ``--site`` that selects no profile

_BIND = "--cpu-bind=cores"
_PLACE = "# Modules and environment of your site;"

_CORES = re.compile(r"\d+-\d+(,\d+-\d+)*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNSAFE = re.compile(r'["`\n]|\$\(')  # ends the quotes of a shell, or starts a command
_COMMAND = re.compile(r"[;&|`\n]|\$\(")


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteNode(CheckedFields):
    """Properties of a compute node; 0 or an empty value means unknown."""

    table: ClassVar[str] = "node"
    cpus: Count = 0
    """CPUs that a job may use on a node, in the unit of ``--cpus-per-task``."""
    mem: str = ""
    """Memory of a node, such as ``512G``: the largest value of ``--mem``."""
    gpus: Count = 0
    """GPUs of a node."""
    numa_domains: Count = 0
    """NUMA domains of a node."""
    adapters: Count = 0
    """Fast network adapters of a node."""
    network: Literal["slingshot", "infiniband", ""] = ""
    """Network of the fast adapters."""
    gpu_cores: Texts = field(default_factory=list)
    """Cores next to each GPU, such as ``49-55``, in the order of the GPU indices."""

    def check(self) -> None:
        """Check the ranges of cores and the memory."""
        for text in self.gpu_cores:
            ok = bool(_CORES.fullmatch(text) and parse_numbers(text))
            require(ok, 'node.gpu_cores must be cores such as "0-15" for each GPU', text)
        ok = not self.mem or bool(megabytes(self.mem))
        require(ok, 'node.mem must be a size in the format of Slurm, such as "512G"', self.mem)

    def cpu_mask(self) -> str:
        """Return the ``--cpu-bind`` that binds local rank ``i`` to the cores next to GPU ``i``."""
        masks = (sum(1 << core for core in parse_numbers(text)) for text in self.gpu_cores)
        return f"mask_cpu:{','.join(f'{mask:x}' for mask in masks)}"

    def excess(
        self, tasks: int, *, cpus: int | None, gpus: int | None, mem: str | None
    ) -> Iterator[str]:
        """Yield a text for each request that exceeds this node, with the value and the limit.

        Args:
            tasks: ranks on the node.
            cpus: CPUs of each rank; None means one.
            gpus: GPUs of the node, if requested.
            mem: memory of the node in the format of Slurm, if requested.
        """
        each = f" ({tasks} ranks with {cpus} CPUs)" if cpus else f" ({tasks} ranks)"
        rows = (
            ("CPUs", tasks * (cpus or 1), self.cpus, each),
            ("GPUs", gpus or 0, self.gpus, ""),
        )
        for name, asked, limit, shown in rows:
            if limit and asked > limit:
                yield f"a node must have the {asked} {name} of the job{shown}, but has {limit}"
        if (megabytes(mem or "") or 0) > (megabytes(self.mem) or math.inf):
            yield f"a node must have the memory of the job, --mem={mem}, but has {self.mem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteJob(CheckedFields):
    """Rules for jobs of a machine, and the environment that its network needs."""

    table: ClassVar[str] = "job"
    account: str = ""
    """Slurm account to charge without ``--account``."""
    account_form: str = ""
    """Form of account names, on machines where each job must name an account."""
    partition: str = ""
    """Partition of jobs without ``--partition``; [node] describes its nodes."""
    options: Texts = field(default_factory=list)
    """Further options of ``sbatch``, such as ``--constraint=gpu``."""
    cpu_bind: str = "cores"
    """Value of ``srun --cpu-bind``; empty to omit the option."""
    srun: Texts = field(default_factory=list)
    """Further options of ``srun``."""
    modules: Texts = field(default_factory=list)
    """Modules that a job loads."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables that a job exports; the shell expands variables in their values."""
    scratch: Texts = field(default_factory=list)
    """Directories for runs and data."""

    def check(self) -> None:
        """Check that the texts are safe in a batch script."""
        for name in ("account", "account_form", "partition", "cpu_bind"):
            _require_plain(f"job.{name}", [getattr(self, name)])
        for name in ("options", "srun", "modules", "scratch"):
            _require_plain(f"job.{name}", getattr(self, name))
        for name, text in self.variables.items():
            ok = _NAME.fullmatch(name) and isinstance(text, str) and not _UNSAFE.search(text)
            rule = "job.variables must be names with texts that contain no quotes or commands"
            require(bool(ok), rule, f"{name} = {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteProfile(CheckedFields):
    """Profile of a machine; by default, commands use slurm/site.toml or recognize the machine."""

    name: str = ""
    """Name of the profile."""
    title: str = ""
    """Name of the machine, for messages."""
    recognize: Texts = field(default_factory=list)
    """Patterns that identify the machine: ``host=login*.machine`` or ``VARIABLE=value``."""
    sources: Texts = field(default_factory=list)
    """Pages of the documentation with their dates."""
    job: SiteJob = field(default_factory=SiteJob)
    node: SiteNode = field(default_factory=SiteNode)

    def check(self) -> None:
        """Check that the name is safe in a batch script."""
        _require_plain("name", [self.name])

    @property
    def label(self) -> str:
        """Name of the machine in messages."""
        return self.title or self.name or "this site"

    def lacks_account(self, given: str | None, environ: Mapping[str, str] = os.environ) -> bool:
        """Return True if jobs must name an account, and neither ``given`` nor a variable does."""
        return bool(self.job.account_form) and not (given or environ.get("SBATCH_ACCOUNT"))

    def node_of(self, partition: str | None, options: Iterable[str]) -> SiteNode:
        """Return the node of a job; empty if its partition or constraint selects other nodes."""
        is_other = bool(self.job.partition) and partition not in (None, self.job.partition)
        others = (each for each in options if each not in self.job.options)
        is_other |= any(each.startswith("--constraint") for each in others)
        return SiteNode() if is_other else self.node

    def matches(self, environ: Mapping[str, str], host: str) -> bool:
        """Return True if the host name or a variable identifies this machine."""
        pairs = (each.partition("=") for each in self.recognize)
        return any(
            fnmatch.fnmatchcase(host if name == "host" else environ.get(name, ""), pattern)
            for name, _, pattern in pairs
        )

    def write_into(self, script: str, *, is_full: bool) -> str:
        """Return a batch script that has this site's modules, variables and options of srun.

        Args:
            script: text of a template with settings.
            is_full: whether the job has all cores of its nodes and one rank per GPU. Then each
                rank is bound to the cores next to its GPU.
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
    """List the names of the profiles in the package, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir())


def text(name: str) -> str:
    """Return the text of a profile of the package."""
    return _file(name).read_text(encoding="utf-8")


def find(
    name: str | None = None, environ: Mapping[str, str] = os.environ, host: str | None = None
) -> SiteProfile | None:
    """Return the profile with a name or in a file, or by default the profile of this machine.

    Without a name, the file ``slurm/site.toml`` has priority over recognized machines. The result
    is None if the machine is unknown or the name is ``none``.

    Raises:
        ConfigError: no profile has this name, or the file is not a profile.
    """
    if name == NONE:
        return None
    if name is not None:
        return read(name)
    if OWN.is_file():
        return read(str(OWN))
    host = socket.gethostname() if host is None else host
    return next((each for each in map(read, names()) if each.matches(environ, host)), None)


def read(name: str) -> SiteProfile:
    """Return the profile of the package with this name, or of this TOML file.

    Raises:
        ConfigError: no profile has this name, or the file is not a profile.
    """
    file = Path(name) if name.endswith(".toml") else _file(name)
    values = TomlValues(SiteProfile)
    given = dict(read_toml(file, SiteProfile, f"`hpctrain site init {file}` writes a profile"))
    if fault := fault_of(given, VERSION):
        raise ConfigError(f"the site profile {file} cannot be read: {fault}")
    values.merge(((key, given[key]) for key in given if key not in STAMP), str(file))
    return values.build()


def _require_plain(name: str, texts: Iterable[str]) -> None:
    for text in texts:
        require(not _COMMAND.search(text), f"{name} must not contain commands of a shell", text)


def _file(name: str) -> Traversable:
    if name not in names():
        raise ConfigError(
            f"--site must be {NONE}, a TOML file or one of {', '.join(names())}, got {name!r}; "
            f"`hpctrain site init FILE.toml` writes a profile of this machine"
        )
    return _folder() / f"{name}.toml"


def _folder() -> Traversable:
    return resources.files("hpctrain.launch") / "sites"
