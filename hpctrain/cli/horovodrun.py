"""Options of ``horovodrun`` that ``hpctrain launch`` accepts, and remedies for all other options.

Most options set a variable of Horovod. If hpctrain has a corresponding variable, the option sets
the variable of hpctrain instead.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from hpctrain.core import horovod_variables
from hpctrain.core.errors import ConfigError, LaunchError

PANEL = "Options of horovodrun"


class SupportedOption(NamedTuple):
    """Option of horovodrun that sets environment variables of the ranks."""

    names: str
    variable: str
    metavar: str = ""  # placeholder of the value; empty for a switch
    value: str = "1"  # value of the variable if the switch is given
    factor: int = 1  # converts the unit of the option to the unit of the variable
    help: str = ""  # an option without help is accepted but not shown

    def variables(self, given: str) -> dict[str, str]:
        """Return the environment variables that the option sets for the value ``given``."""
        text = given if self.metavar else self.value
        try:
            if self.factor != 1:
                text = str(int(horovod_variables.number(text) * self.factor))
            for known in horovod_variables.HONOURED:
                if known.name == self.variable:
                    value = known.parse(text)
                    name = f"HPCTRAIN_{known.setting.upper()}"
                    return {} if value is None else {name: str(value)}
        except ConfigError as error:
            raise ConfigError(f"{self.names.split()[-1]} {given}: {error}") from None
        return {self.variable: text}


class UnsupportedOption(NamedTuple):
    """Option of horovodrun that hpctrain does not support, with a remedy."""

    names: str
    remedy: str
    num_values: int = 1


_SWITCHES = (
    *("hierarchical-allreduce", "hierarchical-allgather", "autotune", "mpi-threads-disable"),
)
_NUMBERS = (
    *("cache-capacity", "num-nccl-streams", "thread-affinity", "gloo-timeout-seconds"),
    *("autotune-warmup-samples", "autotune-steps-per-sample", "autotune-bayes-opt-max-samples"),
    "autotune-gaussian-process-noise",
)
"""Options with a number that set the variable of the same name, such as HOROVOD_CACHE_CAPACITY."""


def _variable(option: str) -> str:
    return f"HOROVOD_{option.upper().replace('-', '_')}"


ACCEPTED = (
    SupportedOption(
        "--timeline-filename", "HOROVOD_TIMELINE", "FILE", help="Write a timeline of rank 0."
    ),
    SupportedOption(
        "--timeline-mark-cycles",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        help="Mark cycles in the timeline.",
    ),
    SupportedOption(
        "--fusion-threshold-mb",
        "HOROVOD_FUSION_THRESHOLD",
        "MIB",
        factor=1 << 20,
        help="Size of the buffer in which small named operations are fused.",
    ),
    SupportedOption(
        "--cycle-time-ms",
        "HOROVOD_CYCLE_TIME",
        "MS",
        help="Time in which named operations are collected.",
    ),
    SupportedOption(
        "--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", help="Do not report stalled operations."
    ),
    SupportedOption("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", "S"),
    SupportedOption(
        "--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "S"
    ),
    SupportedOption(
        "--log-level", "HOROVOD_LOG_LEVEL", "LEVEL", help="Level of messages that the ranks print."
    ),
    SupportedOption(
        "--reset-limit",
        "HPCTRAIN_ELASTIC_RESET_LIMIT",
        "N",
        help="Resets that elastic.run allows.",
    ),
    SupportedOption("--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME"),
    SupportedOption("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", value="0"),
    SupportedOption("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", "FILE"),
    *(SupportedOption(f"--{name}", _variable(name)) for name in _SWITCHES),
    SupportedOption("--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", value="0"),
    *(SupportedOption(f"--{name}", _variable(name), "N") for name in _NUMBERS),
)

FULFILLED = {
    "--disable-cache": 0,
    "--gloo": 0,
    "--mpi": 0,
    "--stall-check": 0,
    "--start-timeout": 1,
}
"""Options without effect, because hpctrain always behaves as they request.

Each option has the number of its arguments.
"""

_FIXED = (
    "the number of ranks is fixed by -np; --recover, --spares and --restart continue after a rank "
    "has died, see `hpctrain guide slurm`"
)

REFUSED = (
    UnsupportedOption("--min-np --min-num-proc", _FIXED),
    UnsupportedOption("--max-np --max-num-proc", _FIXED),
    UnsupportedOption("--host-discovery-script", _FIXED),
    UnsupportedOption("--elastic-timeout", _FIXED),
    UnsupportedOption("--blacklist-cooldown-range", _FIXED, num_values=2),
    UnsupportedOption("--slots-per-host", "set the ranks of each host by -H a:2,b:2"),
    UnsupportedOption(
        "-p --ssh-port", "set it for these hosts in ~/.ssh/config, which ssh and the launcher read"
    ),
    UnsupportedOption("--output-filename", "use --tag-output and redirect the output into a file"),
    UnsupportedOption(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "omit this option, or pass the option of your mpirun by --mpi-args",
        num_values=0,
    ),
    UnsupportedOption("--tcp", "select the network with --network-interface", num_values=0),
    UnsupportedOption(
        "--binding-args", "pass the options of mpirun by --mpi-args, with --no-bind"
    ),
    UnsupportedOption("--config-file", "set variables: `hpctrain guide horovod-variables`"),
    UnsupportedOption("--jsrun", "start the ranks by jsrun itself instead", num_values=0),
    UnsupportedOption("-cb --check-build", "use `hpctrain doctor`", num_values=0),
    UnsupportedOption("-v --version", "use `hpctrain --version`", num_values=0),
)


def variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that the options in ``given`` set on all ranks.

    Raises:
        LaunchError: hpctrain does not support an option; the message contains the remedy.
        ConfigError: a value is invalid.
    """
    asked = {name for name, value in given.items() if value not in (None, False)}
    for refused in REFUSED:
        if _keyword(refused.names) in asked:
            raise LaunchError(
                f"an option of horovodrun must be one that hpctrain launch supports, got "
                f"{refused.names.replace(' ', ', ')}; "
                f"{refused.remedy}"
            )
    found: dict[str, str] = {}
    for each in ACCEPTED:
        if _keyword(each.names) in asked:
            found |= each.variables(str(given[_keyword(each.names)]))
    return found


def split(interfaces: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names in ``interfaces``; each element may be a comma-separated list."""
    named = [name.strip() for words in interfaces for name in words.split(",")]
    return tuple(dict.fromkeys(name for name in named if name))


def _keyword(names: str) -> str:
    return names.rpartition(" ")[2].lstrip("-").replace("-", "_")


def _parameter(
    names: str, num_values: int, metavar: str = "", text: str = ""
) -> inspect.Parameter:
    kind: Any = (bool, str | None, tuple[str, str] | None)[num_values]
    option = typer.Option(
        *names.split(),
        metavar=metavar or None,
        help=text,
        hidden=not text,
        show_default="none",
        rich_help_panel=PANEL,
    )
    return inspect.Parameter(
        _keyword(names),
        inspect.Parameter.KEYWORD_ONLY,
        default=None if num_values else False,
        annotation=Annotated[kind, option],
    )


PARAMETERS = (
    *(
        _parameter(each.names, int(bool(each.metavar)), each.metavar, each.help)
        for each in ACCEPTED
    ),
    *(_parameter(names, num_values) for names, num_values in FULFILLED.items()),
    *(_parameter(refused.names, refused.num_values) for refused in REFUSED),
)
"""All options of this module, as parameters for the signature of ``hpctrain launch``."""
