"""A configuration from its four sources: arguments, environment, file, defaults."""

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
"""Settings of the environment that are keys of the file too."""

_UNITS = {"bucket_bytes": "B", "budget": "s"}  # of settings that the file has as texts


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedData:
    """A configuration and where each of its values came from."""

    config: RunConfig
    path: Path | None  # the file; None when there is none
    folder: Path
    """Where modules named by the configuration are looked for first."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where the keys that are not defaults were set: ``file digits.toml``, ``argument --set``."""

    def origin(self, name: str) -> str:
        """Say where the key ``name`` was set."""
        return self.origins.get(name, DEFAULT)

    def explain(self, name: str) -> list[tuple[str, str]]:
        """Return rows about one key, or one row per key of a table."""
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
    """Read ``path``, then let the environment and after it ``overrides`` replace its values.

    Without ``path`` there are the defaults. ``overrides`` are ``key=value`` each, the value as in
    TOML; what TOML cannot read is text. ``environment`` has settings that ``HPCTRAIN_*`` variables
    give, by the names of ``Settings``.

    Raises:
        ConfigError: names the source, the key, what it takes and what it got.
    """
    values = TomlValues(RunConfig)
    if path is not None:
        way_out = f"hpctrain train {path} --init writes one"
        values.merge(read_toml(path, RunConfig, way_out), f"file {path}")
    for name, value in (environment or {}).items():
        if name in _ENVIRONMENT:
            text = f"{value} {_UNITS[name]}" if name in _UNITS else value
            source = f"environment HPCTRAIN_{name.upper()}"
            values.merge([(_ENVIRONMENT[name], text)], source)
    for override in overrides:
        values.merge([_parse(override)], f"argument --set {override}")
    folder = absolute(path.parent if path else "").resolve()  # now: an import may change it
    return LoadedData(config=values.build(), path=path, folder=folder, origins=values.origins)


def _parse(override: str) -> tuple[str, Any]:
    name, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not name:
        raise ConfigError(f"--set takes key=value such as train.epochs=5, got {override!r}")
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return name, text
