"""Write a state for other programs: a file of torch, of safetensors, or a directory of DCP."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from hpctrain.checkpoint.format.state_tree import component, flatten
from hpctrain.core.atomic import PART, appear, make_folder, publishing, reason_of, sync
from hpctrain.core.errors import CheckpointError

Kind = Literal["pt", "safetensors", "dcp"]

SKELETON = "hpctrain.skeleton"
"""Entry of a safetensors header: the state without its tensors, as ``tree.flatten`` gives it."""

DCP_INDEX = ".metadata"
"""File that makes a directory one of ``torch.distributed.checkpoint``."""

KINDS: dict[str, Kind] = {".pt": "pt", ".pth": "pt", ".safetensors": "safetensors", "": "dcp"}
"""Ending of a name, and what is written under it."""


def kind_of(path: Path, kind: str | None = None) -> Kind:
    """Return what to write at ``path``: ``kind`` if given, else what its ending says.

    Raises:
        CheckpointError: neither says it.
    """
    found = KINDS.get(path.suffix) if kind is None else kind
    if found not in KINDS.values():
        raise CheckpointError(
            f"a state is exported as pt, safetensors or dcp, by --as or by the ending .pt, "
            f".safetensors or none; got {kind or path.name!r}"
        )
    return cast("Kind", found)


def part_of(state: Mapping[str, Any], path: str) -> Any:
    """Return what lies at a path such as ``model`` or ``optimizer/state/0``.

    Raises:
        CheckpointError: there is no such path; lists what there is.
    """
    value: Any = state
    for number, name in enumerate(names := path.split("/")):
        inside = (
            {component(key): item for key, item in value.items()}
            if isinstance(value, Mapping)
            else {}
        )
        if name not in inside:
            raise CheckpointError(
                f"there is no {'/'.join(names[: number + 1])} in the state; it holds there: "
                f"{', '.join(sorted(inside)[:20]) or 'no names'}"
            )
        value = inside[name]
    return value


def export(
    state: Mapping[str, Any], path: Path | str, kind: Kind, *, overwrite: bool = False
) -> None:
    """Write a state; what is at ``path`` appears whole or not at all.

    Needs memory for copies of the tensors that are views of others. Not collective.

    Args:
        state: of a model, or of a whole run; tensors on the CPU.
        path: of the file, or of the directory for ``dcp``.
        kind: ``pt`` for ``torch.load(..., weights_only=True)``; ``safetensors``, with plain values
            in its header; ``dcp`` for ``torch.distributed.checkpoint``, on any number of ranks.
        overwrite: replace what is there.

    Raises:
        CheckpointError: there is something at ``path``, the disk refuses, or the format does not
            hold such values.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} is there already; choose another name or --overwrite")
    if path.exists() and path.is_dir() != (kind == "dcp"):
        raise CheckpointError(
            f"{path} is {'a directory' if path.is_dir() else 'a file'} and is not replaced by "
            f"{'a directory' if kind == 'dcp' else 'a file'}; choose another name"
        )
    state = _own(state, set())
    try:
        make_folder(path.absolute().parent)
        if kind == "dcp":
            _write_dcp(path, state)
            return
        with publishing(path) as part:
            if kind == "pt":
                with part.open("wb") as file:
                    torch.save(state, file)
            else:
                _write_safetensors(part, state)
    except (OSError, RuntimeError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"cannot write {path}: {_told(error)}; make room, or choose another place or kind"
        ) from error


def _own(value: Any, taken: set[int]) -> Any:
    """Give each tensor its own memory: a view would be written with all that it is a view of."""
    if isinstance(value, Tensor):
        memory = value.untyped_storage()
        is_own = value.is_contiguous() and memory.nbytes() == value.nbytes
        if is_own and memory.data_ptr() not in taken:
            taken.add(memory.data_ptr())
            return value.detach()
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        return {key: _own(item, taken) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own(item, taken) for item in value)
    return value


def _write_safetensors(path: Path, state: Mapping[str, Any]) -> None:
    header = {"format": "pt"}
    if all(isinstance(value, Tensor) for value in state.values()):
        tensors = dict(state)  # of a model: the names that others look for
    else:
        found, skeleton = flatten(state)
        tensors = {path: cast("Tensor", tensor) for path, tensor in found.items()}
        header[SKELETON] = json.dumps(skeleton, allow_nan=False)
    save_file(tensors, path, metadata=header)


def _write_dcp(path: Path, state: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - slow
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    part = path.with_name(path.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            # Without a process group torch says that it saves alone, which is what is asked for.
            warnings.simplefilter("ignore")
            save(dict(state), storage_writer=FileSystemWriter(part), no_dist=True)
        # torch syncs its index before it has written it out of its buffer (seen with 2.13).
        for file in (*part.iterdir(), part):
            sync(file)
        appear(part, path)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"cannot write {path}: {_told(reason)}; make room, or choose another place or kind"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _told(error: BaseException) -> str:
    """Return what the file system said: torch reports a failed write as a failure of its own."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__context__
    return reason_of(cause or error)
