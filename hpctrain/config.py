"""Settings that come from the environment: one table, read once, checked at once."""

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from hpctrain.errors import ConfigError
from hpctrain.units import MIB, parse_bytes, parse_seconds

PREFIX = "HPCTRAIN_"

OVERLAPS = ("auto", "thread", "inline", "end")
"""When buckets travel: chosen by the plan, on a thread, inside the hooks, after backward."""

SHARED_MEMORY = ("auto", "memfd", "window", "off")
"""Node memory: the first way that works, one way and no other, or never."""

PROBE = ("auto", "off", "fresh")
"""Algorithms: measured once and remembered, chosen by rule, or measured again."""


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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # also what is no number
        raise ConfigError(f"a number of seconds above 0 is needed, got {text!r}")
    return seconds


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
    "timeout": _seconds,
    "plan": _file,
    "probe": _one_of(PROBE),
    "stats": _flag,
    "trace": _flag,
    "log_dir": Path,
    "stage_dir": _file,
    "budget": parse_seconds,
}


def given(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read and check the variables that are set: values by names of ``Settings``.

    Raises:
        ConfigError: a value is not valid; the message names the variable.
    """
    environ = os.environ if environ is None else environ
    values = {}
    for name, parse in _PARSERS.items():
        if (text := environ.get(PREFIX + name.upper())) is None:
            continue
        try:
            values[name] = parse(text)
        except ConfigError as error:
            raise ConfigError(f"{PREFIX}{name.upper()}: {error}") from None
    return values


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


_FOR_TOOLS = ("REQUIRE", "TEST_HANG_S", "SITE")
"""Names under our prefix that other parts read: the test suite's and the batch scripts', never
an unknown setting."""


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


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
