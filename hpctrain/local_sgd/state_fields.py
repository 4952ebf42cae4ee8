"""States of objects, by tables of their attributes."""

from collections.abc import Mapping
from copy import deepcopy
from functools import reduce
from operator import attrgetter
from typing import Any, ClassVar

Fields = Mapping[str, str | tuple[str, ...]]
"""From a name in a state to an attribute, or to several in a row; dots lead into parts, and ``[]``
is behind the name of a list of objects that have states."""

_PARTS = "[]"


class StateFields:
    """What an object goes on from: shared by all ranks, and a rank's own in mid-round.

    Attributes that have such states themselves give and load them; others are copied. A class
    adds to the tables of its bases.
    """

    _SHARED: ClassVar[Fields] = {}
    _OWN: ClassVar[Fields] = {}

    def shared_state(self) -> dict[str, Any]:
        """Return what is the same on every rank, for any number of ranks. Collective."""
        return _state_of(self, "_SHARED", "shared_state")

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Begin a round after a state of any number of ranks. Collective."""
        _load(self, "_SHARED", "load_shared_state", state)

    def own_state(self) -> dict[str, Any]:
        """Return what is this rank's own in the middle of a round. Collective."""
        return _state_of(self, "_OWN", "own_state")

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of a round, after ``load_shared_state``. Collective."""
        _load(self, "_OWN", "load_own_state", state)


def _fields(owner: object, table: str) -> dict[str, str | tuple[str, ...]]:
    bases = reversed(type(owner).__mro__)
    return {name: path for base in bases for name, path in vars(base).get(table, {}).items()}


def _state_of(owner: object, table: str, method: str) -> dict[str, Any]:
    def at(path: str | tuple[str, ...]) -> Any:
        if isinstance(path, tuple):
            return [at(one) for one in path]
        value = attrgetter(path.removesuffix(_PARTS))(owner)
        if path.endswith(_PARTS):
            return [getattr(part, method)() for part in value]
        return getattr(value, method)() if hasattr(value, method) else deepcopy(value)

    return {name: at(path) for name, path in _fields(owner, table).items()}


def _load(owner: object, table: str, method: str, state: Mapping[str, Any]) -> None:
    for name, path in _fields(owner, table).items():
        paths, values = ((path,), (state[name],)) if isinstance(path, str) else (path, state[name])
        for one, value in zip(paths, values, strict=True):
            _put(owner, one, method, value)


def _put(owner: object, path: str, method: str, state: Any) -> None:
    *parents, name = path.removesuffix(_PARTS).split(".")
    holder = reduce(getattr, parents, owner)
    now = getattr(holder, name)
    if path.endswith(_PARTS):
        for part, own in zip(now, state, strict=True):
            getattr(part, method)(own)
    elif hasattr(now, method):
        getattr(now, method)(state)
    else:
        setattr(holder, name, deepcopy(state))
