"""Saving and restoring of attributes of objects, listed in tables of attribute names."""

from collections.abc import Mapping
from copy import deepcopy
from functools import reduce
from operator import attrgetter
from typing import Any, ClassVar

Fields = Mapping[str, str | tuple[str, ...]]
"""For each key of a saved state, an attribute path, or several paths with values saved as a list.

Dots separate the names of a path. A path that ends with ``[]`` names a list of objects, each with
the methods of ``StateFields``."""

_LIST = "[]"


class StateFields:
    """Saves and restores the attributes that the class tables ``_SHARED`` and ``_OWN`` list.

    ``_SHARED`` lists the state that is identical on every rank, ``_OWN`` the state of one rank in
    the middle of a round. If an attribute has the methods of this class, these methods save and
    restore the attribute; other attributes are copied. A class extends the tables of its base
    classes.
    """

    _SHARED: ClassVar[Fields] = {}
    _OWN: ClassVar[Fields] = {}

    def shared_state(self) -> dict[str, Any]:
        """Return the state that any number of ranks can load. Collective."""
        return _state_of(self, "_SHARED", "shared_state")

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Begin a round from a state that any number of ranks saved. Collective."""
        _load(self, "_SHARED", "load_shared_state", state)

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank in the middle of a round. Collective."""
        return _state_of(self, "_OWN", "own_state")

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue in the middle of a round, after ``load_shared_state``. Collective."""
        _load(self, "_OWN", "load_own_state", state)


def _fields(owner: object, table: str) -> dict[str, str | tuple[str, ...]]:
    bases = reversed(type(owner).__mro__)
    return {name: path for base in bases for name, path in vars(base).get(table, {}).items()}


def _state_of(owner: object, table: str, method: str) -> dict[str, Any]:
    def at(path: str | tuple[str, ...]) -> Any:
        if isinstance(path, tuple):
            return [at(one) for one in path]
        value = attrgetter(path.removesuffix(_LIST))(owner)
        if path.endswith(_LIST):
            return [getattr(item, method)() for item in value]
        return getattr(value, method)() if hasattr(value, method) else deepcopy(value)

    return {name: at(path) for name, path in _fields(owner, table).items()}


def _load(owner: object, table: str, method: str, state: Mapping[str, Any]) -> None:
    for name, path in _fields(owner, table).items():
        paths, values = ((path,), (state[name],)) if isinstance(path, str) else (path, state[name])
        for one, value in zip(paths, values, strict=True):
            _put(owner, one, method, value)


def _put(owner: object, path: str, method: str, state: Any) -> None:
    *parents, name = path.removesuffix(_LIST).split(".")
    holder = reduce(getattr, parents, owner)
    now = getattr(holder, name)
    if path.endswith(_LIST):
        for item, own in zip(now, state, strict=True):
            getattr(item, method)(own)
    elif hasattr(now, method):
        getattr(now, method)(state)
    else:
        setattr(holder, name, deepcopy(state))
