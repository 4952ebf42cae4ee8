"""One file of ``torch.save`` with a whole state, read without running code of it."""

import pickle
from pathlib import Path
from typing import Any

import torch

from hpctrain.core.errors import CheckpointError


def load(path: Path | str) -> dict[str, Any]:
    """Read what ``torch.save`` wrote; all tensors are on the CPU. Runs no code from the file.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it holds more than plain values.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}; check the path") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged or was not written by hpctrain: "
            f"{str(error).splitlines()[0]}; use another one"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"cannot read checkpoint {path}: {error}; use another one"
        ) from error
    return state
