"""The keys of a configuration: name, type, default and sentence, read off the dataclasses."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_origin

from hpctrain.train.config import RunConfig

TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key that a configuration file may hold."""

    name: str
    """Dotted, with its table: ``train.epochs``."""
    type: type
    """``str``, ``int``, ``float``, ``bool``, or ``dict``."""
    default: Any
    sentence: str
    takes_number: bool = False
    """Whether a text may be a whole number instead."""

    @property
    def type_name(self) -> str:
        """What it takes, for people."""
        return TYPE_NAMES[self.type] + (" or a whole number" if self.takes_number else "")

    @property
    def table(self) -> str:
        """Name of the table; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        """Name inside the table."""
        return self.name.rpartition(".")[2]


@functools.cache
def all_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order of the file."""
    return {key.name: key for key in _keys(RunConfig(), "")}


@functools.cache
def all_tables() -> dict[str, str]:
    """The sentence of every table, by its name; the top of the file has the empty name."""
    top = RunConfig()
    tables = {"": _summary(RunConfig)}
    for item in fields(top):
        value = getattr(top, item.name)
        if is_dataclass(value):
            tables[item.name] = _summary(type(value))
    return tables


def value_of(config: RunConfig, name: str) -> Any:
    """The value of the key ``name``."""
    return functools.reduce(getattr, name.split("."), config)


def _keys(config: Any, prefix: str) -> Iterator[Key]:
    sentences = _sentences(type(config))
    tables = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            tables.append((value, f"{item.name}."))
            continue
        takes_number = item.type == str | int
        kind = item.type if isinstance(item.type, type) else get_origin(item.type)
        kind = str if takes_number else kind
        yield Key(
            name=prefix + item.name,
            type=kind if kind in TYPE_NAMES else dict,
            default=value,
            sentence=sentences[item.name],
            takes_number=takes_number,
        )
    for table, name in tables:
        yield from _keys(table, name)


def _summary(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _sentences(cls: type) -> dict[str, str]:
    """Read the string below each field, which Python itself does not keep."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    sentences = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                sentences[name] = inspect.cleandoc(text).replace("\n", " ")
    return sentences
