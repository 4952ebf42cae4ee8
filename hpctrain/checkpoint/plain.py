"""One file with the whole state: simple, atomic, and for models that fit in one rank's memory."""

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import CheckpointError
from hpctrain.files import make_folder, publishing, reason_of

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


def save(path: Path | str, state: dict[str, Any]) -> None:
    """Write a state to a file, which appears at once and on disk, or stays as it was.

    Args:
        path: of the file; its directory is made when missing.
        state: tensors, numbers, strings and containers of these, such as ``state_dict()`` gives.

    Raises:
        CheckpointError: the disk refuses, or the state holds what ``load`` would not read.
    """
    path = Path(path)
    try:
        make_folder(path.parent)
        with publishing(path) as part:
            with part.open("wb") as file:
                torch.save(state, file)
            _check_loadable(part)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {_told(error)}; what was there before is intact, "
            f"make room or choose another directory"
        ) from error
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"a checkpoint holds tensors and plain Python values, got something else: {error}"
        ) from error


def load(path: Path | str) -> dict[str, Any]:
    """Read what ``save`` wrote; all tensors are on the CPU. Runs no code from the file.

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


def save_on_root(path: Path | str, state: dict[str, Any], comm: "Communicator") -> None:
    """Write the state of rank 0, and return when it is on disk.

    Collective: every rank calls it; what the other ranks pass is not used.

    Raises:
        CheckpointError: rank 0 could not write; the same on every rank.
    """
    message = ""
    if comm.rank == 0:
        try:
            save(path, state)
        except CheckpointError as error:
            message = str(error)
    if message := comm.broadcast_object(message):
        raise CheckpointError(message)


def _check_loadable(part: Path) -> None:
    if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(part):
        raise CheckpointError(
            f"a checkpoint holds tensors and plain Python values, got {', '.join(foreign)}; "
            f"convert them, for example with float(), str() or torch.from_numpy()"
        )


def _told(error: BaseException) -> str:
    """Return what the file system said: torch reports a failed write as a failure of its own."""
    cause: BaseException | None = error
    while cause and not isinstance(cause, OSError):
        cause = cause.__context__
    return reason_of(cause or error)
