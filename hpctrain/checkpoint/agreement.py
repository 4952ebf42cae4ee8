"""Actions of a checkpoint whose failure is a CheckpointError, on one rank or on all of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hpctrain.comm import agreement
from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")


def attempt(what: str, action: Callable[[], T]) -> tuple[str | None, T | None]:
    """Run an action; return why it failed, or None, and its result.

    Args:
        what: is done, for messages: "cannot ``write checkpoint x``".
        action: may raise CheckpointError, or what files and memory raise.
    """
    try:
        return None, action()
    except CheckpointError as error:
        return str(error), None
    except (OSError, MemoryError, RuntimeError) as error:
        reason = reason_of(error) or type(error).__name__
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        return f"cannot {what}: {reason}{named}; see to it, or use another directory", None


def on_root(comm: "Communicator", what: str, action: Callable[[], T]) -> T:
    """Run an action on rank 0; return its result on every rank. Collective.

    Raises:
        CheckpointError: it failed; on every rank.
    """

    def tried() -> T:
        refusal, result = attempt(what, action)
        if refusal is not None:
            raise CheckpointError(refusal)
        return result  # type: ignore[return-value]  # it did not fail

    return agreement.on_root(comm, tried, CheckpointError)
