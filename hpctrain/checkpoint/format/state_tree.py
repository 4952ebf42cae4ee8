"""Conversion of a state to tensors by path and a JSON skeleton, which contain no code."""

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hpctrain.checkpoint.format.shard import TensorPiece
from hpctrain.core.errors import CheckpointError
from hpctrain.core.torch_compat import is_wrapper

MAX_DEPTH = 100  # maximum nesting, which ends the traversal of a container that contains itself

_INT64 = 1 << 63
_LIKE_INT = re.compile(r"-?\d+")


def flatten(state: object) -> tuple[dict[str, Tensor | TensorPiece], Any]:
    """Return the tensors and pieces of a state by path, and all other values as JSON.

    A path joins the keys and indices that lead to a tensor, such as ``optimizer/state/0/exp_avg``.
    In keys, ``/`` and ``%`` are escaped as ``%2F`` and ``%25``; the first character is escaped if
    a text key looks like an integer. Raises ``CheckpointError``, with path and type: the state
    contains a value other than None, bool, int, float, str, bytes, tensors, pieces, and lists,
    tuples and dicts (with str or int keys) of these.
    """
    leaves: dict[str, Tensor | TensorPiece] = {}
    return leaves, _take(state, (), leaves)


def unflatten(skeleton: object, tensor_of: Callable[[str], Any]) -> Any:
    """Rebuild a state from a skeleton, which may be untrusted, and ``tensor_of(path)``.

    Raises ``CheckpointError``: the skeleton is invalid.
    """
    return _put(skeleton, tensor_of, 0)


def component(key: str | int) -> str:
    """Return a key or an index as a component of a path, with escaped characters."""
    if isinstance(key, int):
        return str(key)
    text = key.replace("%", "%25").replace("/", "%2F")
    if not text:
        return "%"
    if _LIKE_INT.fullmatch(text) or text == "__metadata__":
        return f"%{ord(text[0]):02X}{text[1:]}"
    return text


def _take(value: Any, at: tuple[str, ...], leaves: dict[str, Tensor | TensorPiece]) -> Any:
    if len(at) > MAX_DEPTH:
        raise CheckpointError(
            f"a state must have at most {MAX_DEPTH} nested containers, got more at "
            f"{'/'.join(at[:4])}/...; check whether a container contains itself"
        )
    if isinstance(value, Tensor | TensorPiece):
        path = "/".join(at)
        given = value.tensor if isinstance(value, TensorPiece) else value
        if is_wrapper(given):
            raise CheckpointError(
                f"tensors of a state must have elements of their own, but {path} is a "
                f"{type(given).__name__}; pass a TensorPiece with the elements of this rank"
            )
        leaves[path] = value
        return {"tensor": path}
    if type(value) in (list, tuple):
        items = [_take(item, (*at, str(i)), leaves) for i, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, Mapping):
        return {"dict": [_take_item(key, item, at, leaves) for key, item in value.items()]}
    return _take_plain(value, at)


def _take_plain(value: Any, at: tuple[str, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_INT64 <= value < _INT64 else {"int": hex(value)}
    if kind is float:
        # The shortest decimal form of a finite float is exact. JSON has no inf and nan.
        return value if abs(value) < float("inf") else {"float": value.hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise CheckpointError(
        f"a state must contain only tensors, plain values, lists, tuples and dicts, got "
        f"{kind.__module__}.{kind.__qualname__} at {'/'.join(at) or 'its root'}; convert it, "
        f"for example with float(), str() or torch.from_numpy()"
    )


def _take_item(
    key: object, value: object, at: tuple[str, ...], leaves: dict[str, Tensor | TensorPiece]
) -> list[Any]:
    if type(key) not in (str, int) or (isinstance(key, int) and not -_INT64 <= key < _INT64):
        raise CheckpointError(
            f"keys of a state must be str or int of 64 bit, got {key!r} at "
            f"{'/'.join(at) or 'its root'}; convert the keys"
        )
    assert isinstance(key, str | int)
    return [key, _take(value, (*at, component(key)), leaves)]


def _put(node: Any, tensor_of: Callable[[str], Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"the skeleton of a state must have at most {MAX_DEPTH} nested containers, but this "
            f"one has more"
        )
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [_put(item, tensor_of, depth + 1) for item in node]
    if isinstance(node, dict) and len(node) == 1:
        [(kind, value)] = node.items()
        if kind == "tuple" and isinstance(value, list):
            return tuple(_put(item, tensor_of, depth + 1) for item in value)
        if kind == "dict" and isinstance(value, list):
            return dict(_put_item(item, tensor_of, depth) for item in value)
        if isinstance(value, str) and kind in ("tensor", "int", "float", "bytes"):
            return tensor_of(value) if kind == "tensor" else _plain(kind, value)
    raise CheckpointError(f"the skeleton of a state is damaged: {str(node)[:80]!r}")


def _put_item(item: Any, tensor_of: Callable[[str], Any], depth: int) -> tuple[str | int, Any]:
    if isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int):
        return item[0], _put(item[1], tensor_of, depth + 1)
    raise CheckpointError(f"the skeleton of a state is damaged: {str(item)[:80]!r}")


def _plain(kind: str, text: str) -> int | float | bytes:
    try:
        if kind == "int":
            return int(text, 16)
        if kind == "float":
            return float.fromhex(text)
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise CheckpointError(
            f"the skeleton of a state is damaged: {kind} {text[:80]!r}"
        ) from None


def walk(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield all values of a state with their paths, a container before its items."""
    yield "/".join(at), value
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from walk(item, (*at, component(key)))


def mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a tree of dicts, lists and tuples with each tensor replaced by ``change(tensor)``."""
    match tree:
        case Tensor():
            return change(tree)
        case TensorPiece():
            return TensorPiece(change(tree.tensor), tree.shard)
        case Mapping():
            return {key: mapped(item, change) for key, item in tree.items()}
        case _ if type(tree) in (list, tuple):
            return type(tree)(mapped(item, change) for item in tree)
    return tree


def lines(state: object) -> list[str]:
    """Return a line for every plain value and container, to compare states between ranks.

    Lines of values precede lines of containers, so that the first difference names a value.
    """
    values: list[str] = []
    containers: list[str] = []
    for path, value in walk(state):
        if isinstance(value, Mapping | list | tuple):
            kind = next(each for each in (Mapping, list, tuple) if isinstance(value, each))
            where = path or "the state"
            containers.append(f"{where} is a {kind.__name__.lower()} of {len(value)} items")
        elif not isinstance(value, Tensor | TensorPiece):
            values.append(f"{path} = {_take_plain(value, ())!r}")
    return values + containers
