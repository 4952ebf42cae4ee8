"""Checks of arguments, configuration fields and settings by their type hints.

A hint is a type, a ``Literal``, a name of this module such as ``Count``, or several hints joined
by ``|``. Every error states the rule and the value found.
"""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.units import parse_seconds, parse_size

TYPE_NAMES: dict[type, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}

_ACCEPTED: dict[type, Any] = {int: Integral, float: Real, dict: Mapping, list: (list, tuple)}
"""For each type in a hint, the types of accepted values.

``int`` accepts integers of numpy, but not bool, see ``_is_a``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Condition that values of a type must satisfy.

    ``least`` and ``most`` are inclusive limits; ``above`` and ``below`` are exclusive limits.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    unit: Literal["", "time", "bytes"] = ""
    """Quantity of a value that is given as a text with a unit, such as ``"10min"``.

    Empty for other values. With ``time``, an empty text means that no time is given.
    """
    each: type | None = None
    """Type of the items of a list."""
    names: tuple[str, ...] = ()
    """Valid texts; empty for any text."""

    def check(self, name: str, value: Any, got: object = None) -> None:
        """Raise ``ConfigError`` if ``value`` violates the condition.

        The message quotes ``got``, the text from which the value was parsed, if given.
        """
        found = value if got is None else got
        if isinstance(value, str):
            self._check_text(name, value)
        bounds = (
            ("at least", self.least, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.most, operator.le),
            ("below", self.below, operator.lt),
        )
        named = [f"{word} {bound}" for word, bound, _ in bounds if bound is not None]
        for word, bound, holds in bounds:
            if bound is not None and not holds(value, bound):
                raise ConfigError(
                    f"{name} must be {word} {bound}, got {found!r}; set it to a value "
                    f"{' and '.join(named)}, or omit it for its default"
                )
        if self.each is not None and not all(_is_a(item, self.each) for item in value):
            raise ConfigError(
                f"{name} must be a list, each item {TYPE_NAMES[self.each]}, got {found!r}"
            )

    def _check_text(self, name: str, text: str) -> None:
        try:
            found = {"time": seconds, "bytes": parse_size}[self.unit](text) if self.unit else 1
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        require(found != 0 or self.unit == "time", f"{name} must be above 0", text)
        if self.names:
            require(text in self.names, f"{name} must be one of {', '.join(self.names)}", text)


Count = Annotated[int, Bounds(least=0)]
Number = Annotated[int, Bounds(least=1)]
Positive = Annotated[float, Bounds(above=0)]
Amount = Annotated[float, Bounds(above=0, below=math.inf)]
AtLeast0 = Annotated[float, Bounds(least=0)]
Finite0 = Annotated[float, Bounds(least=0, below=math.inf)]
Fraction = Annotated[float, Bounds(above=0, most=1)]
Decay = Annotated[float, Bounds(least=0, below=1)]
Time = Annotated[str, Bounds(unit="time")]
Size = Annotated[str, Bounds(unit="bytes")]
Texts = Annotated[list[str], Bounds(each=str)]
Overlap = Literal["auto", "thread", "inline", "end"]
"""When buckets are sent: as the plan selects, by a thread, inside hooks, or after backward."""


def require(ok: bool, rule: str, value: object, remedy: str = "") -> None:  # noqa: FBT001 - reads as a sentence
    """Raise a ``ConfigError`` with ``rule``, ``value`` and ``remedy`` unless ``ok``."""
    if not ok:
        raise ConfigError(f"{rule}, got {value!r}{remedy and f'; {remedy}'}")


def require_open(
    is_open: object, what: str, error: type[HpctrainError], remedy: str = "create a new one"
) -> None:
    """Raise ``error`` if an object was closed; ``what`` names its kind, such as ``a Manager``."""
    if not is_open:
        raise error(f"{what} must be open when it is used, but this one was closed; {remedy}")


def require_values(config: object, reason: str, rules: Mapping[str, tuple[Any, str]]) -> None:
    """Raise ``ConfigError`` unless keys have the values that another key requires.

    Args:
        config: configuration of all keys.
        reason: the other key and its value, such as ``train.reproducible = true``.
        rules: maps each key to a pair. The first item is the valid value, or a tuple of the valid
            values. The second is the cause, which a semicolon and a remedy may follow.
    """
    for key, (valid, why) in rules.items():
        value, values = value_of(config, key), valid if isinstance(valid, tuple) else (valid,)
        words = " or ".join(str(each).lower() for each in values)
        cause, _, remedy = why.partition("; ")
        rule = f"{key} must be {words} with {reason}, because {cause}"
        require(value in values, rule, value, remedy or "omit one of them")


def value_of(config: object, name: str) -> Any:
    """Return the value of the dotted key ``name`` of a configuration."""
    return functools.reduce(getattr, name.split("."), config)


def checked(name: str, value: Any, hint: Any, error: type[HpctrainError] = ConfigError) -> Any:
    """Return ``value`` if the type hint allows it; convert an integer if the hint is a float.

    Raises ``error``: the hint does not allow the value; the message contains ``name``.
    """
    try:
        return _checked(name, value, hint)
    except ConfigError as found:
        raise error(str(found)) from None


def _checked(name: str, value: Any, hint: Any) -> Any:
    choices = alternatives(hint)
    for kind, rule in choices:
        if isinstance(rule, str):
            if type(value) is str and value == rule:
                return value
        elif _is_a(value, kind):
            value = float(value) if kind is float and isinstance(value, int) else value
            if rule is not None:
                rule.check(name, value)
            return value
    found = TYPE_NAMES.get(type(value), type(value).__name__)
    of_type = "" if any(kind is type(value) for kind, _ in choices) else f" ({found})"
    one_of = "one of " if isinstance(choices[0][1], str) else ""
    raise ConfigError(f"{name} must be {one_of}{type_name(hint)}, got {value!r}{of_type}")


def type_name(hint: Any) -> str:
    """Return a description of the values that a type hint allows, for messages."""
    words = [rule for _, rule in alternatives(hint) if isinstance(rule, str)]
    free = [
        "a time"
        if rule is not None and rule.unit == "time"
        else TYPE_NAMES.get(kind, "none" if kind is NoneType else kind.__name__)
        for kind, rule in alternatives(hint)
        if not isinstance(rule, str)
    ]
    return " or ".join([", ".join(words), *free] if words else free)


@functools.cache
def alternatives(hint: Any) -> tuple[tuple[type, str | Bounds | None], ...]:
    """Return the types that a hint allows, each in a pair with the condition on its values.

    The condition is the only valid text, the bounds, or None. A ``Literal`` gives one pair for
    each of its texts.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return tuple(found for each in args for found in alternatives(each))
    if origin is Literal:
        return tuple((str, word) for word in args)
    if origin is Annotated:
        return ((get_origin(args[0]) or args[0], args[1]),)
    kind = origin or hint
    kind = dict if kind is Mapping else kind
    return ((kind if isinstance(kind, type) else object, None),)


class CheckedFields:
    """Base class of dataclasses whose constructor checks each field by its type hint.

    Raises ``ConfigError``: a value violates the type hint of its field, or ``check`` raises.
    """

    __slots__ = ()
    table: ClassVar[str] = ""
    """Name of the table in the configuration file, for messages."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, hint in _hints(cls).items():
            checked(f"{self.table}.{name}" if self.table else name, getattr(self, name), hint)
        self.check()

    def check(self) -> None:
        """Check combinations of fields. Raises ``ConfigError``: fields contradict each other."""


def seconds(text: str) -> float | None:
    """Return the seconds of a duration such as ``"10min"``, or None for an empty text."""
    return parse_seconds(text) if text else None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cls)}


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, _ACCEPTED.get(kind, kind))
