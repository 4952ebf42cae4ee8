"""Settings in force, and the source of each."""

from dataclasses import fields

from hpctrain.core import horovod_variables
from hpctrain.core.config import Given, Settings, read, unknown_variables
from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.doctor.host.facts import Facts

CHECK = "settings"


def check(facts: Facts) -> list[Finding]:
    """Name variables that are not valid or not known; else list every setting."""
    try:
        chosen = read(facts.environ)
    except ConfigError as error:
        return [Finding(CHECK, "error", str(error), "mend the variable, or unset it")]
    found = []
    for text in unknown_variables(facts.environ):
        what, _, hint = text.partition("; ")
        name = what.partition(" ")[0]
        found.append(Finding(CHECK, "warning", what, f"unset {name}: {hint}"))
    for text in horovod_variables.remarks(facts.environ):
        what, _, hint = text.partition("; ")
        found.append(Finding(CHECK, "note", what, hint))
    return found + [
        Finding(CHECK, "ok", f"{field.name} = {_value(field.name, chosen)}")
        for field in fields(Settings)
    ]


def _value(name: str, chosen: dict[str, Given]) -> str:
    if name in chosen:
        return f"{chosen[name].value}, from {chosen[name].variable}"
    return f"{getattr(Settings(), name)}, the default"
