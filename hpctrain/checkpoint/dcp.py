"""Directories of ``torch.distributed.checkpoint``, read without running code from them.

Their index, ``.metadata``, is a pickle. It names classes and functions of torch: each becomes a
stand-in that keeps what it is given, so that no class or function of this process is called,
made or changed.
"""

import io
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.format.tensor_file import open_regular
from hpctrain.checkpoint.tools.export import DCP_INDEX
from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import CheckpointError

_NAMES = {
    ("builtins", "getattr"),  # Python 3.11.2 pickles the member of an enumeration so
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}


def read(directory: Path) -> dict[str, Any]:
    """Return the state of a directory that ``torch.distributed.checkpoint`` wrote, on any ranks.

    Torch writes numbers that were keys as text: those of an optimizer's state become numbers
    again. It writes no empty dicts and lists; that of an optimizer without state is there again.

    Raises:
        CheckpointError: it is damaged, or holds more than tensors and plain values.
    """
    try:
        index = _index(directory)
        return _Reader(directory, index).state()
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{directory} holds more than tensors and plain values, or is damaged: "
            f"{reason_of(error)}; nothing of it was run, use another one"
        ) from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to say
        raise CheckpointError(
            f"cannot read {directory} as a directory of torch.distributed.checkpoint: "
            f"{type(error).__name__}: {reason_of(error)}; use another one"
        ) from error


class _StandIn:
    """What a pickle makes in place of an object: the arguments and the state that it gives."""

    arguments: tuple[Any, ...] = ()
    state: object = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        # Of the class itself it is a call without an object, so a pickle cannot set attributes
        # there, as it can of any class that lacks this method.
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Gives out stand-ins, of its own for every pickle, and dtypes, which cannot be changed."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, type[_StandIn]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{DCP_INDEX} names {module}.{name}")
        return self._kinds.setdefault(name, type(name, (_StandIn,), {}))


@dataclass(frozen=True, slots=True)
class _Index:
    """What the index says, as plain dicts of attributes."""

    values: dict[str, Any]
    """By name: stand-ins of tensors and of other values."""
    paths: Mapping[str, tuple[str | int, ...]]
    places: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]]
    """By name, and for a part of a tensor its offset."""


def _index(directory: Path) -> _Index:
    told = _Unpickler(_bytes_of(directory / DCP_INDEX)).load()
    if not _is(told, "Metadata"):
        raise CheckpointError(f"{directory / DCP_INDEX} is no index of a checkpoint; use another")
    index = _attributes(told)
    places = {}
    for key, place in index["storage_data"].items():
        part = _attributes(key)
        offset = part.get("offset")
        places[part["fqn"], None if offset is None else _numbers(offset)] = _attributes(place)
    return _Index(index["state_dict_metadata"], index.get("planner_data") or {}, places)


def _is(value: object, kind: str) -> bool:
    return isinstance(value, _StandIn) and type(value).__name__ == kind


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that a pickle gives to an object."""
    state = value.state
    if not isinstance(state, dict):
        raise TypeError(f"attributes are a dict, got {type(state).__name__}")
    return state


def _numbers(size: Any) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size``."""
    (numbers,) = size.arguments
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size has a number that is none")
    return tuple(numbers)


def _bytes_of(path: Path, start: int = 0, length: int = -1) -> bytes:
    """Read a file that is no link: a link may lead out of the directory."""
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(start)
        return file.read(length)


class _Reader:
    def __init__(self, directory: Path, index: _Index) -> None:
        self._directory = directory
        self._index = index
        self._num_bytes = sum(file.stat().st_size for file in directory.glob("*.distcp"))

    def state(self) -> dict[str, Any]:
        tree: dict[Any, Any] = {}
        for name, about in self._index.values.items():
            is_tensor = _is(about, "TensorStorageMetadata")
            value = self._tensor(name, _attributes(about)) if is_tensor else self._load(name, None)
            _place(tree, self._index.paths.get(name, (name,)), value)
        state = _lists(tree)
        if not isinstance(state, dict):
            raise CheckpointError(f"{self._directory} holds no dict of values; use another one")
        return state

    def _tensor(self, name: str, about: dict[str, Any]) -> Tensor:
        shape, dtype = _numbers(about["size"]), about["properties"].state[0]
        chunks = [
            (_numbers(chunk["offsets"]), _numbers(chunk["sizes"]))
            for chunk in map(_attributes, about["chunks"])
        ]
        covered = sum(math.prod(sizes) for _, sizes in chunks)
        if covered != math.prod(shape) or covered * dtype.itemsize > self._num_bytes:
            raise CheckpointError(
                f"{self._directory}: tensor {name} of shape {shape} is not wholly there; use "
                f"another checkpoint"
            )
        whole = torch.empty(shape, dtype=dtype)
        for start, sizes in chunks:
            part = self._load(name, start)
            target = whole[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
            is_right = isinstance(part, Tensor) and part.dtype == dtype
            if not is_right or tuple(part.shape) != sizes or tuple(target.shape) != sizes:
                raise CheckpointError(
                    f"{self._directory}: a part of tensor {name} is not as its index says; use "
                    f"another checkpoint"
                )
            target.copy_(part)
        return whole

    def _load(self, name: str, offset: tuple[int, ...] | None) -> Any:
        place = self._index.places[name, offset]
        file = place["relative_path"]
        if Path(file).name != file:
            raise CheckpointError(
                f"{self._directory}: {name} would be read from {file!r}, files lie in the "
                f"directory itself; use another checkpoint"
            )
        if extensions := place.get("transform_descriptors"):
            raise CheckpointError(
                f"{self._directory}: {name} is written with {extensions}; write it without "
                f"extensions"
            )
        data = _bytes_of(self._directory / file, place["offset"], place["length"])
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _place(tree: dict[Any, Any], path: tuple[str | int, ...], value: object) -> None:
    *above, last = path
    for key in above:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise CheckpointError(f"{key} is both a value and a dict; use another checkpoint")
    tree[last] = value


def _lists(tree: object) -> object:
    """Make lists of what was numbered, and an optimizer's state what torch takes back."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_lists(tree[key]) for key in sorted(tree)]
    made = {key: _lists(value) for key, value in tree.items()}
    state = made.get("state", {})
    if "param_groups" in made and isinstance(state, dict):
        made["state"] = {
            int(key) if isinstance(key, str) and key.isdecimal() else key: value
            for key, value in state.items()
        }
    return made
