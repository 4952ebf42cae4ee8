"""Configuration from arguments, environment, file and defaults, in this order of precedence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.core.checks import type_name, value_of
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import dumps, keys_of, tables_of
from hpctrain.core.paths import absolute
from hpctrain.core.python_compat import tomllib
from hpctrain.core.toml_values import TomlValues, read_toml, unknown_key
from hpctrain.train.run_config import RunConfig

DEFAULT = "default"

_ENVIRONMENT = {
    "overlap": "comm.overlap",
    "bucket_bytes": "comm.bucket_size",
    "ranks_per_node": "comm.ranks_per_node",
    "budget": "stop.after",
}
"""Attributes of ``Settings``, each with the configuration key of the same meaning."""

_UNITS = {"bucket_bytes": "B", "budget": "s"}
"""Units of the settings that a configuration stores as text with a unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedData:
    """A configuration with the origin of each value."""

    config: RunConfig
    path: Path | None  # None without a file
    folder: Path
    """Folder that is searched first for modules that the configuration names."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Origin of each key that is not a default: ``file digits.toml``, ``argument --set``."""

    def origin(self, name: str) -> str:
        """Return the origin of the key ``name``."""
        return self.origins.get(name, DEFAULT)

    def explain(self, name: str) -> list[tuple[str, str]]:
        """Return rows that describe the key ``name``, or one row per key of the table ``name``.

        Raises:
            ConfigError: there is no such key or table.
        """
        keys = keys_of(RunConfig)
        if name in tables_of(RunConfig):
            return [(key.name, key.sentence) for key in keys.values() if key.table == name]
        if name not in keys:
            raise ConfigError(unknown_key(RunConfig, name))
        key = keys[name]
        return [
            ("key", key.name),
            ("meaning", key.sentence),
            ("type", type_name(key.hint)),
            ("default", dumps(key.default)),
            ("value", dumps(value_of(self.config, name))),
            ("set by", self.origin(name)),
        ]


def load(
    path: Path | None, overrides: Sequence[str] = (), environment: Mapping[str, Any] | None = None
) -> LoadedData:
    """Return the configuration of a file, with overrides.

    Args:
        path: TOML file; None for the defaults.
        overrides: texts ``key=value``; a value that is not valid TOML is a string. Overrides take
            precedence over ``environment``.
        environment: values of ``HPCTRAIN_*`` variables, by attribute of ``Settings``. These values
            take precedence over the file.

    Raises:
        ConfigError: a key is unknown, or a value is invalid.
    """
    values = TomlValues(RunConfig)
    if path is not None:
        if path.suffix == ".py":
            raise ConfigError(
                f"a configuration must be a TOML file, got {path}; start a script with `hpctrain "
                f"launch -n RANKS -- python {path}`, or submit it with `hpctrain submit -- python "
                f"{path}`"
            )
        remedy = f"create it with hpctrain train {path} --init"
        values.merge(read_toml(path, RunConfig, remedy), f"file {path}")
    for name, value in (environment or {}).items():
        if name in _ENVIRONMENT:
            text = f"{value} {_UNITS[name]}" if name in _UNITS else value
            source = f"environment HPCTRAIN_{name.upper()}"
            values.merge([(_ENVIRONMENT[name], text)], source)
    for override in overrides:
        values.merge([_parse(override)], f"argument --set {override}")
    folder = absolute(path.parent if path else "").resolve()  # before an import may chdir
    return LoadedData(config=values.build(), path=path, folder=folder, origins=values.origins)


def _parse(override: str) -> tuple[str, Any]:
    name, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not name:
        raise ConfigError(f"--set must be key=value, such as train.epochs=5, got {override!r}")
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return name, text
