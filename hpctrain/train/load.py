"""A configuration from its four sources: arguments, environment, file, defaults."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.train.config import RunConfig
from hpctrain.train.keys import Key, all_keys, all_tables, dumps, value_of

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
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where the keys that are not defaults were set: ``file digits.toml``, ``argument --set``."""

    @property
    def folder(self) -> Path:
        """Where modules named by the configuration are looked for first."""
        return (self.path.parent if self.path else Path()).resolve()

    def origin(self, name: str) -> str:
        """Say where the key ``name`` was set."""
        return self.origins.get(name, DEFAULT)

    def explain(self, name: str) -> list[tuple[str, str]]:
        """Return rows about one key, or one row per key of a table.

        Raises ``ConfigError``: ``name`` is neither a key nor a table.
        """
        keys = all_keys()
        if name in all_tables():
            return [(key.name, key.sentence) for key in keys.values() if key.table == name]
        if name not in keys:
            raise ConfigError(unknown_key(name))
        key = keys[name]
        return [
            ("key", key.name),
            ("meaning", key.sentence),
            ("type", key.type_name),
            ("default", dumps(key.default)),
            ("value", dumps(value_of(self.config, name))),
            ("set by", self.origin(name)),
        ]


def load(
    path: Path | None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, Any] | None = None,
) -> LoadedData:
    """Read ``path``, then let the environment and after it ``overrides`` replace its values.

    Without ``path`` there are the defaults. ``overrides`` are ``key=value`` each, the value as in
    TOML; what TOML cannot read is text. ``environment`` has settings that ``HPCTRAIN_*`` variables
    give, by the names of ``Settings``.

    Raises:
        ConfigError: names the source, the key, what it takes and what it got.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        _merge(values, origins, _read(path).items(), f"file {path}")
    for name, value in (environment or {}).items():
        if name in _ENVIRONMENT:
            text = f"{value} {_UNITS[name]}" if name in _UNITS else value
            source = f"environment HPCTRAIN_{name.upper()}"
            _merge(values, origins, [(_ENVIRONMENT[name], text)], source)
    for override in overrides:
        _merge(values, origins, [_parse(override)], f"argument --set {override}")
    try:
        config = _build(values)
    except ConfigError as error:
        raise ConfigError(f"{_blame(str(error), origins)}{error}") from None
    return LoadedData(config=config, path=path, origins=origins)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}; hpctrain train {path} --init writes one"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    return dict(_flat(document))


def _flat(document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict) and name in all_tables():
            yield from ((f"{name}.{short}", item) for short, item in value.items())
        else:
            yield name, value


def _parse(override: str) -> tuple[str, Any]:
    name, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not name:
        raise ConfigError(f"--set takes key=value such as train.epochs=5, got {override!r}")
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return name, text


def _merge(
    values: dict[str, Any],
    origins: dict[str, str],
    items: Iterable[tuple[str, Any]],
    source: str,
) -> None:
    for given, value in items:
        try:
            key, inner = _find(given)
            if inner:
                values[key.name] = _with(values.get(key.name, key.default), inner, value)
            else:
                values[key.name] = key.checked(value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        origins[key.name] = source


def _find(name: str) -> tuple[Key, str]:
    """The key that ``name`` means, and what follows it when it points into a free table."""
    keys = all_keys()
    if name in keys:
        return keys[name], ""
    for key in keys.values():
        if key.is_table and name.startswith(f"{key.name}."):
            return key, name.removeprefix(f"{key.name}.")
    raise ConfigError(unknown_key(name))


def unknown_key(name: str) -> str:
    """Say that ``name`` is no key, which one may be meant, and what its table takes."""
    keys = all_keys()
    table, _, short = name.rpartition(".")
    if name in all_tables():
        return f"{name} is a table; write [{name}], or name one of its keys"
    if table not in all_tables():
        table = ""
    close = difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
    close += [key.name for key in keys.values() if key.short == short]
    close += [f"{table}.args.{short}"] if f"{table}.args" in keys else []
    hint = f"did you mean {close[0]}? " if close else ""
    valid = [key.short for key in keys.values() if key.table == table]
    valid += [f"[{each}]" for each in all_tables() if each and not table]
    where = f"[{table}]" if table else "the top of the file"
    return f"{name} is not a key; {hint}{where} takes {', '.join(valid)}"


def _with(table: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy of ``table`` in which the dotted ``name`` has ``value``."""
    first, _, rest = name.partition(".")
    inner = table.get(first, {})
    if rest and not isinstance(inner, Mapping):
        raise ConfigError(f"{first} holds {inner!r}, so {name} cannot be set; set {first} itself")
    return {**table, first: _with(inner, rest, value) if rest else value}


def _build(values: Mapping[str, Any]) -> RunConfig:
    tables: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        table, _, short = name.rpartition(".")
        tables.setdefault(table, {})[short] = value
    top = RunConfig()
    inner = {name: type(getattr(top, name))(**table) for name, table in tables.items() if name}
    return RunConfig(**tables.get("", {}), **inner)


def _blame(message: str, origins: Mapping[str, str]) -> str:
    """The source of the value that ``message`` begins with."""
    name = message.partition(" ")[0].rstrip(":")
    return f"{origins[name]}: " if name in origins else ""
