"""Settings that come from the environment: one table, read once, checked at once."""

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from hpctrain.core import horovod_variables
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB, parse_bytes, parse_seconds

PREFIX = "HPCTRAIN_"

OVERLAPS = ("auto", "thread", "inline", "end")
"""When buckets travel: chosen by the plan, on a thread, inside the hooks, after backward."""

SHARED_MEMORY = ("auto", "memfd", "window", "off")
"""Node memory: the first way that works, one way and no other, or never."""

PROBE = ("auto", "off", "fresh")
"""Algorithms: measured once and remembered, chosen by rule, or measured again."""

ENGINES = ("hpctrain", "horovod")
"""What moves tensors: our own communicators, or Horovod's operations."""

HOROVOD_WAYS = ("auto", "flat", "two-level")
"""How Horovod's sums travel between nodes: as measured, by one call, or in three."""

CHECK_WEIGHTS = ("error", "warn", "off")
"""Replicas that part: end all ranks, tell of it once, or are not compared."""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
"""What is printed: from so important on."""


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"a switch is 1 or 0, got {text!r}")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"a whole number of at least 0 is needed, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # also what is no number
        raise ConfigError(f"a number of seconds above 0 is needed, got {text!r}")
    return seconds


def _seconds_or_zero(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _file(text: str) -> Path:
    if not text:
        raise ConfigError(f"the name of a file is needed, got {text!r}")
    return Path(text)


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ConfigError(f"one of {', '.join(choices)} is needed, got {text!r}")
        return text

    return parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What ``HPCTRAIN_*`` variables say; ``HPCTRAIN_BUCKET_BYTES`` sets ``bucket_bytes``."""

    ranks_per_node: int | None = None
    """Declares nodes on one host: every so many ranks of a host are a node of their own."""
    shared_memory: str = "auto"
    """How the ranks of a node share memory; ``auto`` ends at plain MPI where they cannot,
    ``memfd`` and ``window`` are an error there, ``off`` never tries."""
    overlap: str = "auto"
    """When gradients travel: ``thread``, ``inline``, ``end``, or ``auto``."""
    bucket_bytes: int = 25 * MIB
    """Largest message while gradients travel during backward."""
    check_weights: str = "error"
    """What replicas that part lead to, which each step compares by a sample of their weights:
    ``error``, ``warn``, or ``off``."""
    timeout: float = 600.0
    """Seconds that a wait for other ranks may last; ``inf`` for ever."""
    plan: Path | None = None
    """File with the plan to use, such as the ``plan.json`` of an earlier run."""
    probe: str = "auto"
    """Whether algorithms are measured: ``auto`` once for each shape of world, ``off`` never,
    ``fresh`` now, whatever was measured before."""
    stats: bool = False
    """Print what was moved, and how long was waited, at the end."""
    trace: bool = False
    """Print one line per collective."""
    log_dir: Path | None = None
    """Folder for ``rank-N.log`` of each rank; none when unset."""
    stage_dir: Path | None = None
    """Folder of each node to which ``stage="auto"`` copies data sets; else what the job has."""
    budget: float | None = None
    """Seconds after which a run of ``hpctrain train`` stops, saves and exits with code 85."""
    log_level: str = "warning"
    """What of hpctrain's own messages is printed: ``debug``, ``info``, ``warning``, ..."""
    fusion_bytes: int | None = None
    """Most bytes of small named operations that travel as one; 0 for each by itself. When unset
    what the plan says."""
    cycle_s: float | None = None
    """Seconds in which named operations gather before they travel. When unset what the plan
    says."""
    stall_s: float = 30.0
    """Seconds after which a named operation that some rank does not submit is reported; ``inf``
    for never."""
    stall_abort_s: float = math.inf
    """Seconds after which such an operation ends all ranks with exit code 86."""
    timeline: Path | None = None
    """File for a timeline of the named operations of rank 0; of all ranks, a file for each, where
    the name has ``{rank}``."""
    timeline_mark_cycles: bool = False
    """Mark in the timeline where each cycle of the controller begins."""
    elastic_reset_limit: int | None = None
    """How often ``elastic.run`` may begin again; as often as needed when unset."""
    engine: str = "hpctrain"
    """What moves tensors between ranks: ``hpctrain``, or ``horovod`` where that is installed."""
    horovod_way: str = "auto"
    """How sums of the engine ``horovod`` travel between nodes: ``flat``, ``two-level``, or
    ``auto`` for what is measured to be faster."""
    alone: bool = False
    """Allow a process to be a world of one where a launcher or a job speaks of several ranks."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read and check the variables.

        Raises:
            ConfigError: a value is not valid; the message names the variable.
        """
        return cls(**given(environ))


_PARSERS: dict[str, Callable[[str], Any]] = {
    "ranks_per_node": _positive,
    "shared_memory": _one_of(SHARED_MEMORY),
    "overlap": _one_of(OVERLAPS),
    "bucket_bytes": parse_bytes,
    "check_weights": _one_of(CHECK_WEIGHTS),
    "timeout": _seconds,
    "plan": _file,
    "probe": _one_of(PROBE),
    "stats": _flag,
    "trace": _flag,
    "log_dir": Path,
    "stage_dir": _file,
    "budget": parse_seconds,
    "log_level": _one_of(LOG_LEVELS),
    "fusion_bytes": parse_bytes,
    "cycle_s": _seconds_or_zero,
    "stall_s": _seconds,
    "stall_abort_s": _seconds,
    "timeline": _file,
    "timeline_mark_cycles": _flag,
    "elastic_reset_limit": _whole,
    "engine": _one_of(ENGINES),
    "horovod_way": _one_of(HOROVOD_WAYS),
    "alone": _flag,
}


class Given(NamedTuple):
    """What a variable says."""

    value: Any
    variable: str


def given(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read and check the variables that are set: values by names of ``Settings``.

    Raises:
        ConfigError: a value is not valid; the message names the variable.
    """
    return {name: said.value for name, said in read(environ).items()}


def read(environ: Mapping[str, str] | None = None) -> dict[str, Given]:
    """Read the variables as ``given`` does, and tell which of them says it.

    Where ours is not set, a variable of Horovod's with the same meaning is read.

    Raises:
        ConfigError: a value is not valid; the message names the variable.
    """
    environ = os.environ if environ is None else environ
    found = {name: _read(name, parse, environ) for name, parse in _PARSERS.items()}
    return {name: said for name, said in found.items() if said is not None}


def may_be_alone(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether HPCTRAIN_ALONE allows a world of one; no other variable is read.

    Raises:
        ConfigError: its value is not valid.
    """
    said = _read("alone", _flag, os.environ if environ is None else environ)
    return said is not None and said.value


def _read(name: str, parse: Callable[[str], Any], environ: Mapping[str, str]) -> Given | None:
    variable = PREFIX + name.upper()
    if (text := environ.get(variable)) is None:
        theirs = horovod_variables.read(name, environ)
        return None if theirs is None else Given(*theirs)
    try:
        return Given(parse(text), variable)
    except ConfigError as error:
        raise ConfigError(f"{variable}: {error}") from None


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the user's folder for what can be made again; None where there is no home."""
    environ = os.environ if environ is None else environ
    chosen = Path(environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():  # the standard says to ignore others
        return chosen / "hpctrain"
    try:
        return Path.home() / ".cache" / "hpctrain"
    except RuntimeError:
        return None


def scratch_folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the folders for temporary files of this job that are set, Slurm's first."""
    environ = os.environ if environ is None else environ
    return [Path(environ[name]) for name in ("SLURM_TMPDIR", "TMPDIR") if environ.get(name)]


_FOR_TOOLS = ("ASKED", "REQUIRE", "TEST_HANG_S", "SITE")
"""Names under our prefix that other parts read: the launcher's, the test suite's and the batch
scripts', never an unknown setting."""


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for every ``HPCTRAIN_*`` variable that no setting reads."""
    environ = os.environ if environ is None else environ
    known = [PREFIX + field.name.upper() for field in fields(Settings)]
    unknown = sorted(
        name
        for name in environ
        if name.startswith(PREFIX)
        and name not in known
        and name.removeprefix(PREFIX) not in _FOR_TOOLS
    )
    return [
        f"{name} is not a setting of hpctrain and has no effect; {_hint(name, known)}"
        for name in unknown
    ]


def remarks(environ: Mapping[str, str] | None = None, *, engine: str = "hpctrain") -> list[str]:
    """Return what to tell at start of ``HPCTRAIN_*`` and ``HOROVOD_*`` variables that are set.

    Args:
        environ: the variables; those of this process when None.
        engine: what moves tensors: the engine ``horovod`` reads all of Horovod's by itself.
    """
    environ = os.environ if environ is None else environ
    theirs = [] if engine == "horovod" else horovod_variables.remarks(environ)
    return [*unknown_variables(environ), *theirs]


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
