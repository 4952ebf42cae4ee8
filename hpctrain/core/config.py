"""Settings that come from the environment: one table of type, default and meaning."""

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
"""Codecs of what crosses between nodes, by name."""

Engine = Literal["hpctrain", "horovod"]
ENGINES: tuple[str, ...] = get_args(Engine)
"""What moves tensors: our own communicators, or Horovod's operations."""

Bytes = Annotated[int, Bounds(least=0, unit="bytes")]
Duration = Annotated[float, Bounds(unit="time")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Values of ``HPCTRAIN_*`` variables; ``HPCTRAIN_BUCKET_BYTES`` sets ``bucket_bytes``.

    Each has its type, which is the check, its default and its description. Relative paths start
    at the directory in which this process imported ``hpctrain``.
    """

    ranks_per_node: Number | None = None
    """Declares nodes on one host: every so many ranks of a host are a node of their own."""
    shared_memory: Literal["auto", "memfd", "off"] = "auto"
    """How the ranks of a node share memory; ``auto`` ends at plain MPI where they cannot,
    ``memfd`` is an error there, ``off`` never tries."""
    overlap: Overlap = "auto"
    """When gradients travel: ``thread``, ``inline``, ``end``, or ``auto``."""
    bucket_bytes: Bytes = 25 * MIB
    """Largest message while gradients travel during backward."""
    check_weights: Literal["error", "warn", "off"] = "error"
    """What replicas that part lead to, which each step compares by a sample of their weights, and
    the end of the program by all of them: ``error``, ``warn``, or ``off``."""
    timeout: Positive = 600.0
    """Seconds that a wait for other ranks may last; ``inf`` for ever."""
    plan: Path | None = None
    """File with the plan to use, such as the ``plan.json`` of an earlier run."""
    probe: Literal["auto", "off", "fresh"] = "auto"
    """Whether algorithms are measured: ``auto`` once for each shape of world, ``off`` never,
    ``fresh`` now, whatever was measured before."""
    stats: bool = False
    """Print what was moved, and how long was waited, at the end."""
    trace: bool = False
    """Print one line per collective."""
    log_dir: Path | None = None
    """Folder for ``rank-N.log`` of each rank; none when unset."""
    records: Path | None = None
    """Folder in which ``hpctrain.record`` writes a file for each rank; ``hpctrain study`` sets
    it."""
    stage_dir: Path | None = None
    """Folder of each node to which ``stage="auto"`` copies data sets; else what the job has."""
    budget: Duration | None = None
    """Seconds after which a run of ``hpctrain train`` stops, saves and exits with code 85."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    """What of hpctrain's own messages is printed: ``debug``, ``info``, ``warning``, ..."""
    fusion_bytes: Bytes | None = None
    """Most bytes of small named operations that travel as one; 0 for each by itself. When unset
    what the plan says."""
    cycle_s: AtLeast0 | None = None
    """Seconds in which named operations gather before they travel. When unset what the plan
    says."""
    stall_s: Positive = 30.0
    """Seconds after which a collective that some rank does not come to is reported; ``inf`` for
    never."""
    stall_abort_s: Positive = math.inf
    """Seconds after which such a collective ends all ranks with exit code 86."""
    timeline: Path | None = None
    """File for a timeline of the named operations of rank 0; of all ranks, a file for each, where
    the name has ``{rank}``."""
    timeline_mark_cycles: bool = False
    """Mark in the timeline where each cycle of the controller begins."""
    elastic_reset_limit: Count | None = None
    """How often ``elastic.run`` may begin again; as often as needed when unset."""
    recover: bool = False
    """Let the ranks that are left go on when one dies; ``hpctrain launch --recover`` sets it, and
    starts an MPI that can."""
    spares: Count = 0
    """How many of the ranks wait to take the place of others that die; set by ``hpctrain launch
    --spares``."""
    engine: Engine = "hpctrain"
    """What moves tensors between ranks: ``hpctrain``, or ``horovod`` where that is installed."""
    device_sums: Literal["auto", "host", "nccl"] = "auto"
    """Where gradients of accelerators are summed: ``auto`` inside a node where they are, if that
    can be, else by way of the ``host``; by ``nccl`` over all ranks, or not at all."""
    alone: bool = False
    """Allow a process to be a world of one where a launcher or a job speaks of several ranks."""

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
    """File in which ``hpctrain launch`` writes the signal that it passes on as SIGUSR1."""
    watched: bool = False
    """Write when all ranks have begun and ended, for the launcher: one that loses a node may
    return 0, too."""
    shim_python: Path | None = None
    """Python whose ``import horovod`` finds hpctrain; ``hpctrain shim`` sets it."""
    site: str = ""
    """File of a site's settings that the batch scripts read."""
    require: str = ""
    """Features whose tests must not be skipped."""
    test_hang_s: Positive = math.inf
    """Seconds after which a test counts as a hang."""


_TABLE: dict[str, Any] = {
    **get_type_hints(Settings, include_extras=True),
    **get_type_hints(OwnSettings, include_extras=True),
}


def variable_of(setting: str) -> str:
    """Return the variable that sets what ``Settings`` calls so."""
    return PREFIX + setting.upper()


class Given(NamedTuple):
    """What a variable says."""

    value: Any
    variable: str


def given(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read and check the variables that are set: values by names of ``Settings``.

    Raises ``ConfigError``: a value is not valid; the message names the variable.
    """
    return {name: found.value for name, found in read(environ).items()}


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """Read the variables as ``given`` does, with the name of the variable of each value.

    Where ours is not set, a variable of Horovod's with the same meaning is read. Raises
    ``ConfigError``: a value is not valid; the message names the variable.
    """
    found = {name: _read(name, environ) for name in Settings.__dataclass_fields__}
    return {name: each for name, each in found.items() if each is not None}


def setting(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Return one setting, of ``Settings`` or ``OwnSettings``; no other variable is read.

    Raises ``ConfigError``: its value is not valid.
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
    """Read a text as a type hint says."""
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
    """Return the user's folder for what can be made again; None where there is no home."""
    chosen = Path(environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():  # the standard says to ignore others
        return chosen / "hpctrain"
    try:
        return Path.home() / ".cache" / "hpctrain"
    except RuntimeError:
        return None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for every ``HPCTRAIN_*`` variable that no setting reads.

    One that has the name of Horovod's, but for the prefix, means ours of another name.
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
    """Return the warnings at start about ``HPCTRAIN_*`` and ``HOROVOD_*`` variables.

    The engine ``horovod`` reads all of Horovod's by itself.
    """
    theirs = [] if engine == "horovod" else horovod_variables.remarks(environ)
    return [*unknown_variables(environ), *theirs]
