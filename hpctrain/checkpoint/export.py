"""Export of a state to a file of torch or of safetensors, which other programs read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from hpctrain.checkpoint.format.state_tree import component, mapped
from hpctrain.checkpoint.inspection import load_newest
from hpctrain.core.atomic import make_folder, publishing, refusal
from hpctrain.core.errors import CheckpointError
from hpctrain.core.paths import absolute

ENDINGS = (".pt", ".pth", ".safetensors")


def newest_state(path: Path | str, only: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Return path and state of a checkpoint, or of the newest checkpoint of a run directory.

    If ``only`` is a path in the state, return only the value at that path.
    """
    source, loaded = load_newest(path)
    part = loaded.state if only is None else part_of(loaded.state, only)
    if not isinstance(part, dict):
        raise CheckpointError(
            f"the state to export must be a dict, but {only or 'the state'} of {source} is a "
            f"{type(part).__name__}; choose a part that is a dict with --only"
        )
    return source, part


def part_of(state: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path such as ``model`` or ``optimizer/state/0``."""
    value: Any = state
    for number, name in enumerate(names := path.split("/")):
        inside = (
            {component(key): item for key, item in value.items()}
            if isinstance(value, Mapping)
            else {}
        )
        if name not in inside:
            raise CheckpointError(
                f"a part of a state must exist, but there is no "
                f"{'/'.join(names[: number + 1])}; choose one of "
                f"{', '.join(sorted(inside)[:20]) or 'no names'}"
            )
        value = inside[name]
    return value


def check_ending(path: Path) -> None:
    """Raise ``CheckpointError`` unless the suffix of a file is one of ``ENDINGS``."""
    if path.suffix not in ENDINGS:
        raise CheckpointError(
            f"the file of an export must end in {', '.join(ENDINGS)}, got {path.name!r}"
        )


def export(state: Mapping[str, Any], path: Path | str, *, overwrite: bool = False) -> None:
    """Write a state atomically. Not collective.

    Needs memory for copies of tensors that are views. The suffix of ``path`` selects the format:
    ``torch.load(..., weights_only=True)`` reads ``.pt`` and ``.pth``; a file ``.safetensors``
    contains only tensors, by name.
    """
    path = absolute(path)
    check_ending(path)
    if path.is_dir():
        raise CheckpointError(
            f"the file of an export must not be a directory, but {path} is; choose another name"
        )
    if path.exists() and not overwrite:
        raise CheckpointError(
            f"{path} already exists; choose another name, or replace it with --overwrite"
        )
    own = mapped(state, _owner())
    if path.suffix == ".safetensors" and (
        others := [name for name, value in own.items() if not isinstance(value, Tensor)]
    ):
        raise CheckpointError(
            f"a safetensors file must contain only tensors, but "
            f"{', '.join(map(str, others[:20]))} of the state "
            f"{'are no tensors' if len(others) > 1 else 'is no tensor'}; choose a part with "
            f"--only, such as model, or a file that ends in .pt"
        )
    try:
        make_folder(path.parent)
        with publishing(path) as part:
            if path.suffix == ".safetensors":
                save_file(own, part, metadata={"format": "pt"})
            else:
                with part.open("wb") as file:
                    torch.save(own, file)
    except (OSError, RuntimeError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the file of an export must be writable, but {path} cannot be written: "
            f"{refusal(error, 'choose another directory or file type')}"
        ) from error


def _owner() -> Callable[[Tensor], Tensor]:
    """Return a function that copies tensors that are views, or share memory with earlier ones."""
    taken: set[int] = set()

    def own(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        is_own = tensor.is_contiguous() and memory.nbytes() == tensor.nbytes
        if is_own and memory.data_ptr() not in taken:
            taken.add(memory.data_ptr())
            return tensor.detach()
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    return own
