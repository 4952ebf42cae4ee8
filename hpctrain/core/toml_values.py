"""Values of a configuration, merged from several sources and checked by type hints."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpctrain.core.checks import checked
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import Key, keys_of, tables_of
from hpctrain.core.python_compat import Traversable, tomllib

C = TypeVar("C")


class TomlValues(Generic[C]):
    """Values of a configuration from several sources; later sources override earlier ones.

    Args:
        cls: dataclass of the configuration; each field that is a dataclass is a table.
    """

    def __init__(self, cls: type[C]) -> None:
        self._cls: Any = cls
        self._values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        """Source of each key that is set, such as ``file digits.toml``."""

    def merge(self, items: Iterable[tuple[str, Any]], source: str) -> None:
        """Add pairs of a dotted name and a value.

        A name may address a value inside a key that is a table with arbitrary keys.
        """
        for given, value in items:
            try:
                key, inner = self._find(given)
                if inner:
                    before = self._values.get(key.name, key.default)
                    self._values[key.name] = _with(before, inner, value)
                else:
                    self._values[key.name] = checked(key.name, value, key.hint)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
            self.origins[key.name] = source

    def build(self) -> C:
        """Return the configuration with the merged values."""
        tables: dict[str, dict[str, Any]] = {}
        for name, value in self._values.items():
            table, _, short = name.rpartition(".")
            tables.setdefault(table, {})[short] = value
        top = self._cls()
        try:
            inner = {
                name: replace(getattr(top, name), **table)
                for name, table in tables.items()
                if name
            }
            made: C = self._cls(**tables.get("", {}), **inner)
        except ConfigError as error:
            name = str(error).partition(" ")[0].rstrip(":")
            blamed = f"{self.origins[name]}: " if name in self.origins else ""
            raise ConfigError(f"{blamed}{error}") from None
        return made

    def _find(self, name: str) -> tuple[Key, str]:
        """Return the key that ``name`` starts with, and the rest of ``name``.

        The rest is empty unless the key is a table with arbitrary keys.
        """
        keys = keys_of(self._cls)
        if name in keys:
            return keys[name], ""
        for key in keys.values():
            if key.is_table and name.startswith(f"{key.name}."):
                return key, name.removeprefix(f"{key.name}.")
        raise ConfigError(unknown_key(self._cls, name))


def read_toml(path: Path | Traversable, cls: Any, remedy: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of a TOML file for the configuration class ``cls``."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; {remedy}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None
    for name, value in document.items():
        if isinstance(value, dict) and name in tables_of(cls):
            yield from ((f"{name}.{short}", item) for short, item in value.items())
        else:
            yield name, value


def unknown_key(cls: Any, name: str) -> str:
    """Return the error message for the unknown key ``name``, with similar and valid keys."""
    keys, tables = keys_of(cls), tables_of(cls)
    table, _, short = name.rpartition(".")
    if name in tables:
        return f"{name} is a table; write [{name}], or name one of its keys"
    if table not in tables:
        table = ""
    of_tables = [] if "." in name else difflib.get_close_matches(name, tables, n=1, cutoff=0.75)
    close = [f"[{each}]" for each in of_tables]
    close += difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
    close += [key.name for key in keys.values() if key.short == short]
    close += [f"{table}.args.{short}"] if f"{table}.args" in keys else []
    hint = f"did you mean {close[0]}? " if close else ""
    valid = [key.short for key in keys.values() if key.table == table]
    valid += [f"[{each}]" for each in tables if each and not table]
    where = f"[{table}]" if table else "the top of the file"
    return f"{name} is not a key; {hint}{where} takes {', '.join(valid)}"


def _with(table: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``table`` in which the dotted ``name`` has ``value``."""
    first, _, rest = name.partition(".")
    inner = table.get(first, {})
    if rest and not isinstance(inner, Mapping):
        raise ConfigError(
            f"{first} has the value {inner!r}, so {name} cannot be set; set {first} itself"
        )
    return {**table, first: _with(inner, rest, value) if rest else value}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one dictionary from dotted names to values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return found
