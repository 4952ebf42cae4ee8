"""Directories of ``torch.distributed.checkpoint``, read without running code from them.

Their index, ``.metadata``, is a pickle: only the classes that torch writes there are let in.
"""

import io
import math
import pickle
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from hpctrain.checkpoint.export import DCP_INDEX
from hpctrain.errors import CheckpointError
from hpctrain.files import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.filesystem import _StorageInfo

_CLASSES = {
    ("collections", "OrderedDict"),
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{DCP_INDEX} names {module}.{name}")
        return super().find_class(module, name)


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration: Python 3.11.2 pickles one as a call of getattr."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{DCP_INDEX} asks for {name!r} of {kind!r}")
    return kind[name]


def _index(directory: Path) -> dcp.Metadata:
    index = _Unpickler(io.BytesIO((directory / DCP_INDEX).read_bytes())).load()
    if not isinstance(index, dcp.Metadata):
        raise CheckpointError(f"{directory / DCP_INDEX} is no index of a checkpoint; use another")
    return index


class _Reader:
    def __init__(self, directory: Path, index: dcp.Metadata) -> None:
        self._directory = directory
        self._index = index
        self._places: dict[tuple[str, tuple[int, ...] | None], _StorageInfo] = {
            (key.fqn, None if key.offset is None else tuple(key.offset)): place
            for key, place in index.storage_data.items()
        }
        self._num_bytes = sum(file.stat().st_size for file in directory.glob("*.distcp"))

    def state(self) -> dict[str, Any]:
        tree: dict[Any, Any] = {}
        paths: Mapping[str, tuple[str | int, ...]] = self._index.planner_data or {}
        for name, about in self._index.state_dict_metadata.items():
            value = (
                self._tensor(name, about)
                if isinstance(about, dcp.TensorStorageMetadata)
                else self._load(name, None)
            )
            _place(tree, paths.get(name, (name,)), value)
        state = _lists(tree)
        if not isinstance(state, dict):
            raise CheckpointError(f"{self._directory} holds no dict of values; use another one")
        return state

    def _tensor(self, name: str, about: dcp.TensorStorageMetadata) -> Tensor:
        shape, dtype = tuple(about.size), about.properties.dtype
        covered = sum(math.prod(chunk.sizes) for chunk in about.chunks)
        if covered != math.prod(shape) or covered * dtype.itemsize > self._num_bytes:
            raise CheckpointError(
                f"{self._directory}: tensor {name} of shape {shape} is not wholly there; use "
                f"another checkpoint"
            )
        whole = torch.empty(shape, dtype=dtype)
        for chunk in about.chunks:
            start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
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
        place = self._places[name, offset]
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(
                f"{self._directory}: {name} would be read from {place.relative_path!r}, files "
                f"lie in the directory itself; use another checkpoint"
            )
        if place.transform_descriptors:
            raise CheckpointError(
                f"{self._directory}: {name} is written with {place.transform_descriptors}; write "
                f"it without extensions"
            )
        with (self._directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
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
