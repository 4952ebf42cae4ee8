"""Settings in force, the source of each, and whether all ranks have the same."""

from collections.abc import Mapping
from dataclasses import fields

from hpctrain.cluster.env import tuning
from hpctrain.core import config, horovod_variables
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.check import check, error, note, ok, warning
from hpctrain.doctor.checks.facts import Facts, WorldFacts, differences

OWN_TO_A_NODE = ("log_dir", "stage_dir")
"""Settings that name folders, which may differ between nodes."""

_MEND = "mend the variable, or unset it"
_FOR_ALL = (
    "set it for all of them: mpirun -x NAME for Open MPI, mpiexec -genv for MPICH; srun passes on "
    "the whole environment unless --export says less"
)


@check("settings")
def check_settings(facts: Facts) -> list[Finding]:
    """Name variables that are not valid or not known, and list every setting with its source."""
    try:
        given = config.read(facts.environ)
    except ConfigError as refusal:
        return [error(str(refusal), _MEND)]
    found = []
    for text in config.unknown_variables(facts.environ):
        what, _, hint = text.partition("; ")
        found.append(warning(what, f"unset {what.partition(' ')[0]}: {hint}"))
    for text in horovod_variables.remarks(facts.environ):
        what, _, hint = text.partition("; ")
        found.append(note(what, hint))
    defaults = Settings()
    for field in fields(Settings):
        said = given.get(field.name)
        value = getattr(defaults, field.name) if said is None else said.value
        origin = "the default" if said is None else f"from {said.variable}"
        found.append(ok(f"{field.name} = {value}, {origin}"))
    return found


@check("settings")
def check_equal_settings(world: WorldFacts) -> list[Finding]:
    """Find variables that differ between ranks."""
    ours = [_ours(facts.environ) for facts in world.ranks]
    theirs = [tuning(facts.environ) for facts in world.ranks]
    found = []
    for values, find in ((ours, warning), (theirs, note)):
        found += [
            find(f"{name} differs between ranks, {told}", _FOR_ALL)
            for name, told in differences(values)
        ]
    return found or [ok("the same on all ranks")]


def _ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of hpctrain that all ranks should have in common."""
    names = (config.variable_of(each.name) for each in fields(Settings))
    own = tuple(map(config.variable_of, OWN_TO_A_NODE))
    return {name: environ[name] for name in names if name in environ and name not in own}
