"""Environment variables of Horovod that set fields of ``hpctrain.core.config.Settings``.

``hpctrain guide horovod-variables`` lists all variables.
"""

import difflib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hpctrain.core.errors import ConfigError
from hpctrain.core.paths import from_environment

PREFIX = "HOROVOD_"
GUIDE = "`hpctrain guide horovod-variables`"


class Variable(NamedTuple):
    """A Horovod variable that is read if the corresponding variable of hpctrain is not set."""

    name: str
    setting: str  # name in ``hpctrain.core.config.Settings``
    parse: Callable[[str], Any]  # converts the text; returns None if the setting keeps its default


def number(text: str) -> float:
    """Convert a text to a number of at least 0. Raises ``ConfigError`` for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # NaN also raises
        raise ConfigError(f"the value must be a number of at least 0, got {text!r}")
    return value


_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
_RENAMED = {"trace": "debug", "fatal": "critical"}


def _level(text: str) -> str:
    level = text.lower()
    if level not in _LEVELS:
        raise ConfigError(f"the value must be one of {', '.join(_LEVELS)}, got {text!r}")
    return _RENAMED.get(level, level)


HONOURED = (
    # DYNAMIC lets the program start the timeline later, which hpctrain always allows.
    Variable(
        "HOROVOD_TIMELINE",
        "timeline",
        lambda text: None if text == "DYNAMIC" else from_environment(text),
    ),
    Variable("HOROVOD_TIMELINE_MARK_CYCLES", "timeline_mark_cycles", lambda t: number(t) > 0),
    Variable("HOROVOD_FUSION_THRESHOLD", "fusion_bytes", lambda text: int(number(text))),
    Variable("HOROVOD_CYCLE_TIME", "cycle_s", lambda text: number(text) / 1000),
    Variable("HOROVOD_STALL_CHECK_DISABLE", "stall_s", lambda t: math.inf if number(t) else None),
    Variable("HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_s", lambda text: number(text) or None),
    Variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_abort_s", lambda t: number(t) or None),
    Variable("HOROVOD_LOG_LEVEL", "log_level", _level),
)
"""Variables that hpctrain reads. If several set the same field, the first one has precedence."""

FULFILLED: Mapping[str, tuple[str, ...]] = {
    "HOROVOD_AUTOTUNE": (),
    "HOROVOD_CONTROLLER": ("mpi",),
    "HOROVOD_CPU_OPERATIONS": ("mpi",),
    "HOROVOD_DISABLE_NVTX_RANGES": (),
    "HOROVOD_DYNAMIC_PROCESS_SETS": (),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": (),
    "HOROVOD_LOG_HIDE_TIME": (),
}
"""For each variable, the values that request what hpctrain always does; empty for any value."""


def found(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of Horovod that are set."""
    return {name: text for name, text in environ.items() if name.startswith(PREFIX)}


def remarks(environ: Mapping[str, str]) -> list[str]:
    """Return messages about variables of Horovod that are set but have no effect.

    Each message is a finding and a remedy, separated by a semicolon. If Horovod's launcher started
    the ranks without MPI, the only message is about the launcher.
    """
    idle = sorted(name for name in found(environ) if _is_idle(name, environ))
    if not idle:
        return []
    if environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") and environ.get("HOROVOD_SIZE", "1") != "1":
        text = (
            f"horovodrun started {environ['HOROVOD_SIZE']} processes for Gloo, but hpctrain needs "
            f"MPI; start them with `hpctrain launch`, mpirun, srun or `horovodrun --mpi`"
        )
        return [text]
    verb = "have" if len(idle) > 1 else "has"
    return [f"{', '.join(idle)} {verb} no effect in hpctrain; {_hint(idle)}"]


def _is_idle(name: str, environ: Mapping[str, str]) -> bool:
    if any(name == variable.name for variable in HONOURED):
        return False
    values = FULFILLED.get(name)
    return values is None or bool(values and environ[name].lower() not in values)


def _hint(idle: list[str]) -> str:
    known = [variable.name for variable in HONOURED]
    for name in idle:
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            return f"is {name} meant to be {close[0]}?"
    return f"see {GUIDE}"
