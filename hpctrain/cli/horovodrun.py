"""Options of ``horovodrun`` that ``hpctrain launch`` takes: what each means here, or the way out.

Those that set a variable of Horovod set ours in its place where there is one.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from hpctrain.core import horovod_variables
from hpctrain.core.errors import ConfigError, LaunchError

PANEL = "Options of horovodrun"


class Meant(NamedTuple):
    """An option that sets a variable for the ranks."""

    names: str
    variable: str
    metavar: str = ""  # of its value; a switch has none
    value: str = "1"  # of a switch
    factor: int = 1  # from the unit of the option to that of the variable
    help: str = ""  # without one it is understood, and not shown

    def variables(self, given: str) -> dict[str, str]:
        """Return what the ranks get in their environment."""
        text = given if self.metavar else self.value
        try:
            if self.factor != 1:
                text = str(int(_number(text) * self.factor))
            for each in horovod_variables.HONOURED:
                if each.name == self.variable:
                    value = each.parse(text)
                    name = f"HPCTRAIN_{each.setting.upper()}"
                    return {} if value is None else {name: str(value)}
        except ConfigError as error:
            raise ConfigError(f"{self.names.split()[-1]} {given}: {error}") from None
        return {self.variable: text}


class Refused(NamedTuple):
    """An option that has no meaning here."""

    names: str
    way_out: str
    num_values: int = 1


_SWITCHES = (
    *("hierarchical-allreduce", "hierarchical-allgather", "autotune", "mpi-threads-disable"),
)
_NUMBERS = (
    *("cache-capacity", "num-nccl-streams", "thread-affinity", "gloo-timeout-seconds"),
    *("autotune-warmup-samples", "autotune-steps-per-sample", "autotune-bayes-opt-max-samples"),
    "autotune-gaussian-process-noise",
)
"""Options whose variables have their names."""


def _variable(option: str) -> str:
    return f"HOROVOD_{option.upper().replace('-', '_')}"


MEANT = (
    Meant("--timeline-filename", "HOROVOD_TIMELINE", "FILE", help="Write a timeline of rank 0."),
    Meant(
        "--timeline-mark-cycles",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        help="Mark cycles in the timeline.",
    ),
    Meant(
        "--fusion-threshold-mb",
        "HOROVOD_FUSION_THRESHOLD",
        "MIB",
        factor=1 << 20,
        help="Most that small named operations travel in together.",
    ),
    Meant(
        "--cycle-time-ms",
        "HOROVOD_CYCLE_TIME",
        "MS",
        help="Time in which named operations gather.",
    ),
    Meant("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", help="Report no stalled operation."),
    Meant("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", "S"),
    Meant("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "S"),
    Meant("--log-level", "HOROVOD_LOG_LEVEL", "LEVEL", help="What the ranks print."),
    Meant("--reset-limit", "HPCTRAIN_ELASTIC_RESET_LIMIT", "N", help="Of elastic.run."),
    Meant("--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME"),
    Meant("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", value="0"),
    Meant("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", "FILE"),
    *(Meant(f"--{name}", _variable(name)) for name in _SWITCHES),
    Meant("--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", value="0"),
    *(Meant(f"--{name}", _variable(name), "N") for name in _NUMBERS),
)

FULFILLED = {
    "--disable-cache": 0,
    "--gloo": 0,
    "--mpi": 0,
    "--stall-check": 0,
    "--start-timeout": 1,
}
"""What they ask for is so anyway, or of no account; and how many values they have."""

_FIXED = (
    "the ranks stay the same from beginning to end: give their number by -np; a lost rank ends "
    "the job, which goes on from its checkpoint (`hpctrain guide slurm`)"
)

REFUSED = (
    Refused("--min-np --min-num-proc", _FIXED),
    Refused("--max-np --max-num-proc", _FIXED),
    Refused("--host-discovery-script", _FIXED),
    Refused("--elastic-timeout", _FIXED),
    Refused("--blacklist-cooldown-range", _FIXED, num_values=2),
    Refused("--slots-per-host", "say how many ranks each host takes by -H a:2,b:2"),
    Refused(
        "-p --ssh-port",
        "write it for these hosts into ~/.ssh/config, where ssh and the launcher find it",
    ),
    Refused("--output-filename", "give each line its rank by --tag-output, and redirect that"),
    Refused(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "leave it out, or say it in the words of your mpirun by --mpi-args",
        num_values=0,
    ),
    Refused("--tcp", "name the network by --network-interface", num_values=0),
    Refused("--binding-args", "give mpirun its words by --mpi-args, with --no-bind"),
    Refused("--config-file", "set variables: `hpctrain guide horovod-variables`"),
    Refused("--jsrun", "start the ranks by jsrun itself: they find each other", num_values=0),
    Refused("-cb --check-build", "see `hpctrain doctor`", num_values=0),
    Refused("-v --version", "see `hpctrain --version`", num_values=0),
)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command of typer take these options too; they come to it as further keywords."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    taken = [
        *(_parameter(m.names, int(bool(m.metavar)), m.metavar, m.help) for m in MEANT),
        *(_parameter(names, num_values) for names, num_values in FULFILLED.items()),
        *(_parameter(refused.names, refused.num_values) for refused in REFUSED),
    ]
    # typer looks at nothing else.
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *taken]
    )
    return command


def variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Return what the ranks get in their environment, of what the command was called with.

    Raises ``LaunchError``: an option has no meaning here; says what to do in its place.
    ``ConfigError``: a value is not valid.
    """
    asked = {name for name, value in given.items() if value not in (None, False)}
    for refused in REFUSED:
        if _keyword(refused.names) in asked:
            raise LaunchError(
                f"hpctrain launch has no {refused.names.replace(' ', ', ')} of horovodrun's; "
                f"{refused.way_out}"
            )
    found: dict[str, str] = {}
    for meant in MEANT:
        if _keyword(meant.names) in asked:
            found |= meant.variables(str(given[_keyword(meant.names)]))
    return found


def split(interfaces: Iterable[str]) -> tuple[str, ...]:
    """Return the network interfaces that were named, with commas or one by one, each once."""
    named = [name.strip() for words in interfaces for name in words.split(",")]
    return tuple(dict.fromkeys(name for name in named if name))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"a number is needed, got {text!r}")
    return number


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
        show_default=False,
        rich_help_panel=PANEL,
    )
    return inspect.Parameter(
        _keyword(names),
        inspect.Parameter.KEYWORD_ONLY,
        default=None if num_values else False,
        annotation=Annotated[kind, option],
    )
