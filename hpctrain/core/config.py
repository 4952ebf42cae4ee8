"""Settings that are read from environment variables, with type, default and meaning."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from hpctrain.core import horovod_variables
from hpctrain.core.checks import (
    AtLeast0,
    Bounds,
    Count,
    Number,
    Overlap,
    Positive,
    alternatives,
    checked,
    type_name,
)
from hpctrain.core.errors import ConfigError
from hpctrain.core.paths import from_environment
from hpctrain.core.python_compat import Self
from hpctrain.core.target import hint
from hpctrain.core.units import MIB, parse_bytes, parse_seconds

PREFIX = "HPCTRAIN_"

COMPRESSIONS = (
    "none",
    "auto",
    "fp16",
    "bf16",
    "int8",
    "qsgd",
    "sign",
    "one_bit",
    "top_k",
    "dgc",
    "power_sgd",
)
"""Names of the codecs for messages between nodes."""

Engine = Literal["hpctrain", "horovod"]
ENGINES: tuple[str, ...] = get_args(Engine)
"""Libraries that move tensors: our own communicators, or Horovod's operations."""

Bytes = Annotated[int, Bounds(least=0, unit="bytes")]
Duration = Annotated[float, Bounds(unit="time")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Values of ``HPCTRAIN_*`` variables; ``HPCTRAIN_BUCKET_BYTES`` sets ``bucket_bytes``.

    The type hint of a field determines the valid values. The text below a field describes the
    field in ``hpctrain guide settings``. Relative paths start at ``paths.START``, the directory in
    which this process imported ``hpctrain``.
    """

    ranks_per_node: Number | None = None
    """Number of ranks per simulated node; divides one host into several nodes for tests."""
    shared_memory: Literal["auto", "memfd", "off"] = "auto"
    """How the ranks of a node share memory. If sharing is not possible, ``auto`` uses plain MPI
    and ``memfd`` raises an error; ``off`` always uses plain MPI."""
    binding: Literal["auto", "none"] = "auto"
    """Binding of ranks to cores, unless the launcher has bound the ranks: ``auto`` binds a rank to
    cores next to its GPU, or to its share of all cores; ``none`` does not bind."""
    kernel: Literal["auto", "off"] = "auto"
    """Whether compiled code, if installed, computes the sums within a node; both settings give
    bitwise identical results."""
    overlap: Overlap = "auto"
    """When gradients are sent: during the backward pass, by a ``thread`` or ``inline`` in hooks,
    or at the ``end`` of the pass; ``auto`` uses the choice of the communication plan."""
    bucket_bytes: Bytes = 25 * MIB
    """Largest message, in bytes, in which gradients are sent during the backward pass."""
    check_weights: Literal["error", "warn", "off"] = "error"
    """Reaction to replicas of a model that differ. Each step compares a sample of the weights; the
    end of the program compares all weights."""
    timeout: Positive = 600.0
    """Longest wait for other ranks, in seconds; ``inf`` for no limit."""
    plan: Path | None = None
    """File with the communication plan to use, such as the ``plan.json`` of an earlier run."""
    probe: Literal["auto", "off", "fresh"] = "auto"
    """Whether algorithms are measured: ``auto`` at the first start with these nodes, ranks and
    settings, ``fresh`` at each start, ``off`` never."""
    stats: bool = False
    """Print the bytes, time and waiting time of each operation at the end of the program."""
    trace: bool = False
    """Print one line per collective."""
    log_dir: Path | None = None
    """Folder for the log files: one per host, ``HOST.log``, with the rank in each line."""
    log_per_rank: bool = False
    """Write a log file ``rank-N.log`` for each rank; set by ``hpctrain launch --log-per-rank``."""
    records: Path | None = None
    """Folder in which ``hpctrain.record`` writes one file per rank; set by ``hpctrain study``."""
    stage_dir: Path | None = None
    """Folder on each node to which ``stage="auto"`` copies data sets; by default a temporary
    folder of the job."""
    budget: Duration | None = None
    """Time, such as ``11h``, after which ``hpctrain train`` stops, saves and exits with code
    85."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    """Lowest level of hpctrain's own messages that are printed."""
    fusion_bytes: Bytes | None = None
    """Largest message, in bytes, into which small named operations are combined; 0 sends each
    operation separately. By default from the plan."""
    cycle_s: AtLeast0 | None = None
    """Seconds for which named operations are collected before they are sent. By default from the
    plan."""
    stall_s: Positive = 30.0
    """Seconds after which a collective that only some ranks have called is reported; ``inf`` for
    never."""
    stall_abort_s: Positive = math.inf
    """Seconds after which a collective that only some ranks have called ends all ranks, with exit
    code 86; ``inf`` for never."""
    timeline: Path | None = None
    """File in which rank 0 records the timeline of its named operations; with ``{rank}`` in the
    name, each rank writes a file."""
    timeline_mark_cycles: bool = False
    """Mark the start of each cycle of the controller in the timeline."""
    elastic_reset_limit: Count | None = None
    """Largest number of restarts by ``elastic.run``; unset for no limit."""
    recover: bool = False
    """Continue with the remaining ranks when a rank dies; set by ``hpctrain launch --recover``,
    which also starts an MPI that supports recovery."""
    spares: Count = 0
    """Number of idle ranks that replace ranks that die; set by ``hpctrain launch --spares``."""
    engine: Engine = "hpctrain"
    """Library that moves tensors between ranks; ``horovod`` must be installed."""
    device_sums: Literal["auto", "host", "nccl"] = "auto"
    """Where gradients on GPUs are summed: with ``auto``, within a node on the GPUs if possible;
    with ``host``, on the host; with ``nccl``, by NCCL over all ranks."""
    alone: bool = False
    """Allow a world of one process although the launcher or the job has several ranks."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read and check the variables.

        Raises ``ConfigError``: a value is not valid; the message names the variable.
        """
        return cls(**given(environ))


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSettings:
    """Variables that programs of hpctrain set for each other; users do not set them."""

    asked: Path | None = None
    """File with the name of a signal that ``hpctrain launch`` has received. ``hpctrain launch``
    writes the file, then sends SIGUSR1 to the ranks."""
    watched: bool = False
    """Write a line to stderr when all ranks have started, and another when all have finished. The
    exit code of a launcher is not sufficient: it may be 0 after the loss of a node."""
    shim_python: Path | None = None
    """Python interpreter whose ``import horovod`` imports hpctrain; set by ``hpctrain shim``."""
    site: str = ""
    """File with the settings of a computing site, which the batch scripts read."""
    require: str = ""
    """Features whose tests must not be skipped."""
    test_hang_s: Positive = math.inf
    """Seconds after which a test counts as a hang."""


_TABLE: dict[str, Any] = {
    **get_type_hints(Settings, include_extras=True),
    **get_type_hints(OwnSettings, include_extras=True),
}


def variable_of(setting: str) -> str:
    """Return the name of the environment variable of a field of ``Settings``."""
    return PREFIX + setting.upper()


class Given(NamedTuple):
    """The value of a setting, and the environment variable from which it was read."""

    value: Any
    variable: str


def given(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the checked values of all variables that are set, by field of ``Settings``.

    Raises ``ConfigError``: a value is not valid; the message names the variable.
    """
    return {name: found.value for name, found in read(environ).items()}


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """Return the checked value and the name of each variable that is set, by field.

    If the variable of hpctrain is not set, the Horovod variable with the same meaning is read.
    Raises ``ConfigError``: a value is not valid; the message names the variable.
    """
    found = {name: _read(name, environ) for name in Settings.__dataclass_fields__}
    return {name: each for name, each in found.items() if each is not None}


def setting(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Return the value of one field of ``Settings`` or ``OwnSettings``; read no other field.

    Raises ``ConfigError``: the value is not valid.
    """
    found = _read(name, environ)
    table = Settings if name in Settings.__dataclass_fields__ else OwnSettings
    return getattr(table(), name) if found is None else found.value


def _read(name: str, environ: Mapping[str, str]) -> Given | None:
    if (variable := variable_of(name)) in environ:
        return Given(_parsed(variable, environ[variable], _TABLE[name]), variable)
    for each in horovod_variables.HONOURED:
        if each.setting == name and (text := environ.get(each.name)):
            try:
                value = each.parse(text)
            except ConfigError as error:
                raise ConfigError(f"{each.name}: {error}") from None
            if value is not None:
                return Given(value, each.name)
    return None


_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= dict.fromkeys(("", "0", "false", "no", "off"), False)
_READERS: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: _SWITCH[text.lower()],
    Path: from_environment,
}


def _parsed(variable: str, text: str, hint: Any) -> Any:
    """Convert the text of a variable to the type of its hint, and check the value."""
    kind, rule = next(each for each in alternatives(hint) if each[0] is not NoneType)
    read: Callable[[str], Any] = _READERS.get(kind, kind)
    if isinstance(rule, Bounds) and rule.unit:
        read = parse_bytes if rule.unit == "bytes" else parse_seconds
    try:
        value = read(text)
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None
    except (KeyError, ValueError):
        one_of = "1 or 0" if kind is bool else type_name(hint)
        raise ConfigError(f"{variable} must be {one_of}, got {text!r}") from None
    if isinstance(rule, Bounds):
        rule.check(variable, value, text)
    return checked(variable, value, hint)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's cache folder; None without a home directory."""
    chosen = Path(environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():  # the XDG standard ignores relative paths
        return chosen / "hpctrain"
    try:
        return Path.home() / ".cache" / "hpctrain"
    except RuntimeError:
        return None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for every ``HPCTRAIN_*`` variable that no setting reads.

    If replacing ``HPCTRAIN_`` by ``HOROVOD_`` gives a variable of Horovod, the sentence suggests
    the setting of hpctrain with the same meaning.
    """
    known = [variable_of(name) for name in _TABLE]
    meant = {
        each.name.replace(horovod_variables.PREFIX, PREFIX): variable_of(each.setting)
        for each in horovod_variables.HONOURED
    }
    return [
        f"{name} is not a setting of hpctrain and has no effect"
        f"{hint(meant.get(name, name), known)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]


def remarks(environ: Mapping[str, str] = os.environ, *, engine: str = "hpctrain") -> list[str]:
    """Return the start-up warnings about ``HPCTRAIN_*`` and ``HOROVOD_*`` variables.

    With the engine ``horovod`` there are no warnings about ``HOROVOD_*`` variables, because
    Horovod reads them.
    """
    theirs = [] if engine == "horovod" else horovod_variables.remarks(environ)
    return [*unknown_variables(environ), *theirs]
