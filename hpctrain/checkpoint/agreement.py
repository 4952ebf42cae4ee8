"""Failures agreed on: what fails on one rank fails on all, with the same words."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hpctrain.comm.agreement import by_rank
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


def on_all(comm: "Communicator", what: str, action: Callable[[], T]) -> list[T]:
    """Run an action on every rank; return the results of all ranks, by rank. Collective.

    Raises:
        CheckpointError: it failed on some rank; on every rank.
    """
    answers = comm.allgather_object(attempt(what, action))
    raise_if_any([message for message, _ in answers])
    return [result for _, result in answers]  # type: ignore[misc]  # none failed


def on_root(comm: "Communicator", what: str, action: Callable[[], T]) -> T:
    """Run an action on rank 0; return its result on every rank. Collective.

    Raises:
        CheckpointError: it failed; on every rank.
    """
    answer = attempt(what, action) if comm.rank == 0 else (None, None)
    message, result = comm.broadcast_object(answer)
    if message is not None:
        raise CheckpointError(message)
    return result  # type: ignore[return-value]  # it did not fail


def raise_if_any(messages: list[str | None]) -> None:
    """Raise if a rank failed; ``messages`` holds None or why for every rank.

    Raises:
        CheckpointError: names each message once, with its ranks where not all gave it.
    """
    told = {message for message in messages if message is not None}
    if len(told) == 1 and None not in messages:
        raise CheckpointError(told.pop())
    if told:
        raise CheckpointError(by_rank(messages))
