"""The keys of a configuration file, read off dataclasses, and their values in TOML.

A field is a key: its type says what it takes, the string below it is its sentence.
"""

import ast
import functools
import inspect
import json
import math
import operator
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import parse_seconds

TYPE_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What the values of a type keep to."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    is_time: bool = False
    """A text such as ``"10min"``; an empty one is no time."""
    each: type | None = None
    """Of a list: the type of all that it holds."""
    names: tuple[str, ...] = ()
    """Of a text: what it may be; empty for anything."""

    def check(self, name: str, value: Any) -> None:
        """Return if a value keeps to it.

        Raises ``ConfigError``: it does not; says the rule of the key ``name``.
        """
        if self.is_time:
            try:
                seconds(value)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        if self.names:
            require(value in self.names, f"{name} is one of {', '.join(self.names)}", value)
        bounds = (
            ("at least", self.least, operator.ge),
            ("above", self.above, operator.gt),
            ("below", self.below, operator.lt),
        )
        named = [f"{word} {bound}" for word, bound, _ in bounds if bound is not None]
        for word, bound, holds in bounds:
            if bound is not None and not holds(value, bound):
                raise ConfigError(
                    f"{name} must be {word} {bound}, got {value!r}; set it to a value "
                    f"{' and '.join(named)}, or omit it for its default"
                )
        if self.each is not None:
            rule = f"{name} is a list, each of it {TYPE_NAMES[self.each]}"
            require(all(type(item) is self.each for item in value), rule, value)


Count = Annotated[int, Rule(least=0)]
Number = Annotated[int, Rule(least=1)]
Positive = Annotated[float, Rule(above=0)]
Amount = Annotated[float, Rule(above=0, below=math.inf)]
AtLeast0 = Annotated[float, Rule(least=0)]
Time = Annotated[str, Rule(is_time=True)]
Texts = Annotated[list[str], Rule(each=str)]


def require(ok: bool, rule: str, value: object) -> None:  # noqa: FBT001 - reads as a sentence
    """Raise a ``ConfigError`` with ``rule`` and ``value`` unless ``ok``."""
    if not ok:
        raise ConfigError(f"{rule}, got {value!r}")


def check_rules(config: Any) -> None:
    """Raise a ``ConfigError`` unless the fields of a dataclass keep to the rules of their types.

    For those that are made by programs too; what is read from a file is checked by its keys.
    """
    cls: Any = type(config)
    for name, rule in _rules_of(cls).items():
        rule.check(name, getattr(config, name))


@functools.cache
def _rules_of(cls: type) -> dict[str, Rule]:
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: rule
        for name, hint in hints.items()
        for _, rule in _alternatives(hint)
        if isinstance(rule, Rule)
    }


def seconds(text: str) -> float | None:
    """Read a time; None for an empty text."""
    return parse_seconds(text) if text else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key that a configuration file may hold."""

    name: str
    """Dotted, with its table: ``train.epochs``."""
    takes: tuple[tuple[type, str | Rule | None], ...]
    """The types of its values, each with its one word, or with its rule."""
    default: Any
    sentence: str

    @property
    def type_name(self) -> str:
        """What it takes, for people."""
        words = [rule for _, rule in self.takes if isinstance(rule, str)]
        free = [
            "a time" if isinstance(rule, Rule) and rule.is_time else TYPE_NAMES[kind]
            for kind, rule in self.takes
            if not isinstance(rule, str)
        ]
        return " or ".join([", ".join(words), *free] if words else free)

    @property
    def table(self) -> str:
        """Name of the table; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        """Name inside the table."""
        return self.name.rpartition(".")[2]

    @property
    def is_table(self) -> bool:
        """Whether its value is a table, of any keys."""
        return self.takes[0][0] is dict

    def checked(self, value: Any) -> Any:
        """Return a value that this key takes; a whole number may stand for any number.

        Raises ``ConfigError``: the key does not take it; says what it takes.
        """
        kinds = [kind for kind, _ in self.takes]
        if kinds == [float] and type(value) is int:
            value = float(value)
        if type(value) not in kinds:
            kind = TYPE_NAMES.get(type(value), type(value).__name__)
            raise ConfigError(f"{self.name} is {self.type_name}, got {value!r} ({kind})")
        rules = [rule for kind, rule in self.takes if kind is type(value)]
        if value in rules:
            return value
        rule = next((rule for rule in rules if not isinstance(rule, str)), "")
        if rule == "":
            raise ConfigError(f"{self.name} is one of {self.type_name}, got {value!r}")
        if isinstance(rule, Rule):
            rule.check(self.name, value)
        return value


@functools.cache
def keys_of(cls: type) -> dict[str, Key]:
    """Every key of a configuration by its dotted name, in the order of the file."""
    return {key.name: key for key in _keys(cls(), "")}


@functools.cache
def tables_of(cls: type) -> dict[str, str]:
    """The sentence of every table, by its name; the top of the file has the empty name."""
    values = {item.name: getattr(cls(), item.name) for item in fields(cls)}
    tables = {name: type(value) for name, value in values.items() if is_dataclass(value)}
    return {name: _summary(each) for name, each in {"": cls, **tables}.items()}


def value_of(config: object, name: str) -> Any:
    """The value of the key ``name``."""
    return functools.reduce(getattr, name.split("."), config)


def render(config: object) -> str:
    """Write ``config`` as TOML, with the sentence of each key above it.

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
    """Return the line that sets a key; a table too long for one has a line for each value."""
    line = f"{name} = {dumps(value)}"
    if len(line) < 100 or not isinstance(value, Mapping):
        return [line]
    return [f"{name}.{_bare(inner)} = {dumps(item)}" for inner, item in value.items()]


def dumps(value: Any) -> str:
    """Write one value on one line, so that ``tomllib`` reads the same value back.

    Raises ``TypeError``: TOML has no such value.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML's basic strings have JSON's escapes, but DEL must be escaped too.
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
            takes=tuple(_alternatives(hints[item.name])),
            default=value,
            sentence=sentences[item.name],
        )
    for table, name in tables:
        yield from _keys(table, name)


def _alternatives(hint: Any) -> list[tuple[type, str | Rule | None]]:
    """Return the types that a field may have, each with its one word, or with its rule."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [found for each in args for found in _alternatives(each)]
    if origin is Literal:
        return [(str, word) for word in args]
    if origin is Annotated:
        return [(get_origin(args[0]) or args[0], args[1])]
    return [(hint if hint in TYPE_NAMES else dict, None)]


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _sentences(cls: type) -> dict[str, str]:
    """Read the string below each field, which Python itself does not keep."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    sentences = {}
    for statement, following in pairwise(tree.body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                sentences[name] = inspect.cleandoc(text).replace("\n", " ")
    return sentences
