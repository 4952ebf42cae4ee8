"""Shape check of tensors before they are loaded: one error names all that do not fit."""

from collections.abc import Mapping

from torch import Tensor

from hpctrain.core.errors import CheckpointError


def misfits(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Say in one line each which tensors of ``have`` are not as ``want`` asks.

    Args:
        have: path and tensor, as they were read.
        want: path and tensor, as the model has them; only shapes and types count.

    Returns:
        Missing ones, those of another shape or type, and those that nobody asked for.
    """
    lines = []
    for path, wanted in want.items():
        if path not in have:
            lines.append(f"{path}: missing, {_told(wanted)} is wanted")
        elif _told(have[path]) != _told(wanted):
            lines.append(f"{path}: {_told(have[path])}, {_told(wanted)} is wanted")
    return lines + [
        f"{path}: {_told(tensor)}, nothing of this name is wanted"
        for path, tensor in have.items()
        if path not in want
    ]


def check_fit(have: Mapping[str, Tensor], want: Mapping[str, Tensor], source: object) -> None:
    """Check that all tensors are there, in the shapes and types that are wanted.

    Args:
        have: path and tensor, as they were read.
        want: path and tensor, as the model has them.
        source: what the error calls the checkpoint.

    Raises:
        CheckpointError: they are not; lists every tensor.
    """
    if lines := misfits(have, want):
        raise CheckpointError(
            f"{source} does not fit the model in {len(lines)} "
            f"tensor{'s' * (len(lines) != 1)}; rename and pad them with "
            f"hpctrain.checkpoint.tools.remap, or build the model that was saved:\n  "
            + "\n  ".join(lines)
        )


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
