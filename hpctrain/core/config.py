"""Settings that come from the environment: one table of type, default and meaning."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from hpctrain.core import horovod_variables
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

OVERLAPS = ("auto", "thread", "inline", "end")
"""When buckets travel: chosen by the plan, on a thread, inside the hooks, after backward."""

ENGINES = ("hpctrain", "horovod")
"""What moves tensors: our own communicators, or Horovod's operations."""

Parse = Callable[[str], Any]


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"a switch is 1 or 0, got {text!r}")


def _whole(least: int) -> Parse:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise ConfigError(f"a whole number of at least {least} is needed, got {text!r}")
        return int(text)

    return parse


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


def _one_of(*choices: str) -> Parse:
    def parse(text: str) -> str:
        if text not in choices:
            raise ConfigError(f"one of {', '.join(choices)} is needed, got {text!r}")
        return text

    return parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What ``HPCTRAIN_*`` variables say; ``HPCTRAIN_BUCKET_BYTES`` sets ``bucket_bytes``.

    Each has its type and how its text is read, what holds where no variable is set, a meaning.
    Relative paths start at the directory in which this process imported ``hpctrain``.
    """

    ranks_per_node: Annotated[int | None, _whole(1)] = None
    """Declares nodes on one host: every so many ranks of a host are a node of their own."""
    shared_memory: Annotated[str, _one_of("auto", "memfd", "off")] = "auto"
    """How the ranks of a node share memory; ``auto`` ends at plain MPI where they cannot,
    ``memfd`` is an error there, ``off`` never tries."""
    overlap: Annotated[str, _one_of(*OVERLAPS)] = "auto"
    """When gradients travel: ``thread``, ``inline``, ``end``, or ``auto``."""
    bucket_bytes: Annotated[int, parse_bytes] = 25 * MIB
    """Largest message while gradients travel during backward."""
    check_weights: Annotated[str, _one_of("error", "warn", "off")] = "error"
    """What replicas that part lead to, which each step compares by a sample of their weights, and
    the end of the program by all of them: ``error``, ``warn``, or ``off``."""
    timeout: Annotated[float, _seconds] = 600.0
    """Seconds that a wait for other ranks may last; ``inf`` for ever."""
    plan: Annotated[Path | None, from_environment] = None
    """File with the plan to use, such as the ``plan.json`` of an earlier run."""
    probe: Annotated[str, _one_of("auto", "off", "fresh")] = "auto"
    """Whether algorithms are measured: ``auto`` once for each shape of world, ``off`` never,
    ``fresh`` now, whatever was measured before."""
    stats: Annotated[bool, _flag] = False
    """Print what was moved, and how long was waited, at the end."""
    trace: Annotated[bool, _flag] = False  # print one line per collective
    log_dir: Annotated[Path | None, from_environment] = None
    """Folder for ``rank-N.log`` of each rank; none when unset."""
    records: Annotated[Path | None, from_environment] = None
    """Folder in which ``hpctrain.record`` writes a file for each rank; ``hpctrain study`` sets
    it."""
    stage_dir: Annotated[Path | None, from_environment] = None
    """Folder of each node to which ``stage="auto"`` copies data sets; else what the job has."""
    budget: Annotated[float | None, parse_seconds] = None
    """Seconds after which a run of ``hpctrain train`` stops, saves and exits with code 85."""
    log_level: Annotated[str, _one_of("debug", "info", "warning", "error", "critical")] = "warning"
    """What of hpctrain's own messages is printed: ``debug``, ``info``, ``warning``, ..."""
    fusion_bytes: Annotated[int | None, parse_bytes] = None
    """Most bytes of small named operations that travel as one; 0 for each by itself. When unset
    what the plan says."""
    cycle_s: Annotated[float | None, _seconds_or_zero] = None
    """Seconds in which named operations gather before they travel. When unset what the plan
    says."""
    stall_s: Annotated[float, _seconds] = 30.0
    """Seconds after which a collective that some rank does not come to is reported; ``inf`` for
    never."""
    stall_abort_s: Annotated[float, _seconds] = math.inf
    """Seconds after which such a collective ends all ranks with exit code 86."""
    timeline: Annotated[Path | None, from_environment] = None
    """File for a timeline of the named operations of rank 0; of all ranks, a file for each, where
    the name has ``{rank}``."""
    timeline_mark_cycles: Annotated[bool, _flag] = False
    """Mark in the timeline where each cycle of the controller begins."""
    elastic_reset_limit: Annotated[int | None, _whole(0)] = None
    """How often ``elastic.run`` may begin again; as often as needed when unset."""
    recover: Annotated[bool, _flag] = False
    """Let the ranks that are left go on when one dies; ``hpctrain launch --recover`` sets it, and
    starts an MPI that can."""
    spares: Annotated[int, _whole(0)] = 0
    """How many of the ranks wait to take the place of others that die; set by ``hpctrain launch
    --spares``."""
    engine: Annotated[str, _one_of(*ENGINES)] = "hpctrain"
    """What moves tensors between ranks: ``hpctrain``, or ``horovod`` where that is installed."""
    horovod_way: Annotated[str, _one_of("auto", "flat", "two-level")] = "auto"
    """How sums of the engine ``horovod`` travel between nodes: ``flat``, ``two-level``, or
    ``auto``, which is ``flat``."""
    device_sums: Annotated[str, _one_of("auto", "host", "nccl")] = "auto"
    """Where gradients of accelerators are summed: ``auto`` inside a node where they are, if that
    can be, else by way of the ``host``; by ``nccl`` over all ranks, or not at all."""
    alone: Annotated[bool, _flag] = False
    """Allow a process to be a world of one where a launcher or a job speaks of several ranks."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read and check the variables.

        Raises ``ConfigError``: a value is not valid; the message names the variable.
        """
        return cls(**given(environ))


_TABLE: dict[str, Parse] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Settings, include_extras=True).items()
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
    return {name: said.value for name, said in read(environ).items()}


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """Read the variables as ``given`` does, and tell which of them says it.

    Where ours is not set, a variable of Horovod's with the same meaning is read. Raises
    ``ConfigError``: a value is not valid; the message names the variable.
    """
    found = {name: _read(name, environ) for name in _TABLE}
    return {name: said for name, said in found.items() if said is not None}


def may_be_alone(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether HPCTRAIN_ALONE allows a world of one; no other variable is read.

    Raises ``ConfigError``: its value is not valid.
    """
    said = _read("alone", environ)
    return said is not None and said.value


def device_sums(environ: Mapping[str, str] = os.environ) -> str:
    """Return what HPCTRAIN_DEVICE_SUMS says; no other variable is read.

    Raises ``ConfigError``: its value is not valid.
    """
    said = _read("device_sums", environ)
    return "auto" if said is None else str(said.value)


def recovers(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether HPCTRAIN_RECOVER lets ranks go on when one dies; no other variable is read.

    Raises ``ConfigError``: its value is not valid.
    """
    said = _read("recover", environ)
    return said is not None and bool(said.value)


def records_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return what HPCTRAIN_RECORDS says; no other variable is read.

    Raises ``ConfigError``: its value is not valid.
    """
    said = _read("records", environ)
    return None if said is None else said.value


def _read(name: str, environ: Mapping[str, str]) -> Given | None:
    ours = [(variable_of(name), _TABLE[name])] if variable_of(name) in environ else []
    theirs = [
        (each.name, each.parse)
        for each in horovod_variables.HONOURED
        if each.setting == name and environ.get(each.name)
    ]
    for variable, parse in ours or theirs:
        try:
            value = parse(environ[variable])
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
        if ours or value is not None:
            return Given(value, variable)
    return None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's folder for what can be made again; None where there is no home."""
    chosen = Path(environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():  # the standard says to ignore others
        return chosen / "hpctrain"
    try:
        return Path.home() / ".cache" / "hpctrain"
    except RuntimeError:
        return None


def scratch_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders for temporary files of this job that are set, Slurm's first."""
    return [Path(environ[name]) for name in ("SLURM_TMPDIR", "TMPDIR") if environ.get(name)]


_FOR_TOOLS = ("ASKED", "WATCHED", "REQUIRE", "TEST_HANG_S", "SITE", "SHIM_PYTHON")
"""Names under our prefix that other parts read, never an unknown setting: the launcher's, the test
suite's, the batch scripts' and the shim's."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for every ``HPCTRAIN_*`` variable that no setting reads.

    One that has the name of Horovod's, but for the prefix, means ours of another name.
    """
    known = [variable_of(name) for name in _TABLE]
    meant = {
        each.name.replace(horovod_variables.PREFIX, PREFIX): variable_of(each.setting)
        for each in horovod_variables.HONOURED
    }
    tools = [PREFIX + name for name in _FOR_TOOLS]
    return [
        f"{name} is not a setting of hpctrain and has no effect"
        f"{hint(meant.get(name, name), known)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in (*known, *tools)
    ]


def remarks(environ: Mapping[str, str] = os.environ, *, engine: str = "hpctrain") -> list[str]:
    """Return what to tell at start of ``HPCTRAIN_*`` and ``HOROVOD_*`` variables that are set.

    The engine ``horovod`` reads all of Horovod's by itself.
    """
    theirs = [] if engine == "horovod" else horovod_variables.remarks(environ)
    return [*unknown_variables(environ), *theirs]
