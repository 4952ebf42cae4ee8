"""Failures agreed on: what fails on one rank fails on all of them, with the same words."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import CommError, DataError, MismatchError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


@contextmanager
def together(comm: "Communicator") -> Iterator[None]:
    """Raise on every rank what the block raises on one of them.

    Collective, at the end of the block; in the block no rank may wait for another.

    Raises:
        DataError: the block failed on another rank; on this one its own error goes on.
    """
    try:
        yield
    except BaseException as error:
        tell(comm, error)
        raise
    try:
        comm.agree(True)  # noqa: FBT003 - reads as a sentence
    except MismatchError as error:
        raise DataError(str(error)) from None


def tell(comm: "Communicator", error: BaseException) -> None:
    """Let the others, who end their block with ``together``, know of an error. Collective."""
    # A rank that is lost as well is not what the user must hear of first.
    with suppress(CommError):
        comm.agree(False, str(error) or type(error).__name__)  # noqa: FBT003


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Raise what the file system and HDF5 say as a DataError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"cannot write a data set to {directory}: {reason_of(error)}; "
            f"make room or choose another directory"
        ) from error
