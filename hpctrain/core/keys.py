"""Keys of a configuration file, derived from dataclasses, and their values in TOML.

Each field of a dataclass is a key. The type of the field determines the valid values, and the
string literal below the field is the help text.
"""

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, get_type_hints

from hpctrain.core.checks import alternatives, value_of

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key of a configuration file, with the type, default and help text of its field."""

    name: str
    """Dotted name that includes the table: ``train.epochs``."""
    hint: Any
    """Type hint of the field."""
    default: Any
    sentence: str

    @property
    def table(self) -> str:
        """Name of the table that contains the key; empty for a key at the top of the file."""
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        """Name of the key without the name of its table."""
        return self.name.rpartition(".")[2]

    @property
    def is_table(self) -> bool:
        """Whether the value is a table with arbitrary keys."""
        return alternatives(self.hint)[0][0] is dict


@functools.cache
def keys_of(cls: type) -> dict[str, Key]:
    """Return all keys of a configuration by dotted name, in the order of the file."""
    return {key.name: key for key in _keys(cls(), "")}


@functools.cache
def tables_of(cls: type) -> dict[str, str]:
    """Return the help text of each table by name; the name of the top of the file is ``""``."""
    values = {item.name: getattr(cls(), item.name) for item in fields(cls)}
    tables = {name: type(value) for name, value in values.items() if is_dataclass(value)}
    return {name: _summary(each) for name, each in {"": cls, **tables}.items()}


def render(config: object) -> str:
    """Return ``config`` as TOML, with the help text of each key as a comment.

    Reading the text again gives an equal configuration.
    """
    cls: Any = type(config)
    lines = []
    for table, summary in tables_of(cls).items():
        lines += [f"[{table}]  # {summary}", ""] if table else [f"# {summary}", ""]
        for key in keys_of(cls).values():
            if key.table == table:
                lines += textwrap.wrap(
                    key.sentence, width=97, initial_indent="# ", subsequent_indent="# "
                )
                lines += [*_assigned(key.short, value_of(config, key.name)), ""]
    return "\n".join(lines)


def _assigned(name: str, value: Any) -> list[str]:
    """Return the line that assigns a key, or one line for each value of a long table."""
    line = f"{name} = {dumps(value)}"
    if len(line) < 100 or not isinstance(value, Mapping):
        return [line]
    return [f"{name}.{_bare(inner)} = {dumps(item)}" for inner, item in value.items()]


def dumps(value: Any) -> str:
    """Return a value as one line of TOML, which ``tomllib`` parses to the same value.

    Raises ``TypeError``: TOML cannot represent the value.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML escapes strings as JSON does, but also requires an escape for DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(dumps, value))}]"
        case Mapping():
            items = (f"{_bare(name)} = {dumps(item)}" for name, item in value.items())
            return f"{{ {', '.join(items)} }}" if value else "{}"
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    raise TypeError(f"TOML has no value for {value!r} of type {type(value).__name__}")


def _bare(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else dumps(name)


def _keys(config: Any, prefix: str) -> Iterator[Key]:
    sentences = _sentences(type(config))
    hints = get_type_hints(type(config), include_extras=True)
    tables = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            tables.append((value, f"{item.name}."))
            continue
        yield Key(
            name=prefix + item.name,
            hint=hints[item.name],
            default=value,
            sentence=sentences[item.name],
        )
    for table, name in tables:
        yield from _keys(table, name)


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _sentences(cls: type) -> dict[str, str]:
    """Return the string literal below each field, also of base classes, from the source code."""
    sentences: dict[str, str] = {}
    for base in filter(is_dataclass, cls.__mro__):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, following in pairwise(tree.body):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    sentences.setdefault(name, inspect.cleandoc(text).replace("\n", " "))
    return sentences
