"""Agreement on errors: either all ranks raise or no rank raises."""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.core.errors import CommError, HpctrainError, MismatchError, RankLostError
from hpctrain.core.units import by_rank

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")

GatherObjects = Callable[[Any], list[Any]]
"""Returns the objects of all ranks, by rank. Collective."""
_MAX_SENT = 8
"""Maximum number of different values that are sent to describe a difference."""


@contextmanager
def agreed(comm: "Communicator", error: type[HpctrainError] = MismatchError) -> Iterator[None]:
    """Raise on all ranks at the end of the block if any rank has raised in the block.

    The end of the block is collective. Collectives in the block must raise on all ranks or on
    none. A rank re-raises its own error if the error is no ``HpctrainError``, or if its class is
    ``error`` and its text is the same on all ranks.

    Args:
        comm: the ranks.
        error: class of the error that all ranks raise, with the messages of all ranks.
    """
    try:
        yield
    except RankLostError:
        raise  # an agreement with a lost rank is impossible
    except HpctrainError as own:
        text = merge_messages(refusals_of(comm, str(own)))
        if isinstance(own, error) and text == str(own):
            raise
        raise error(text) from own
    except BaseException as own:
        # The loss of a rank must not hide this error.
        with suppress(CommError):
            refusals_of(comm, str(own) or type(own).__name__)
        raise
    raise_if_refused(comm, None, error)


def on_root(
    comm: "Communicator", action: Callable[[], T], error: type[HpctrainError] = MismatchError
) -> T:
    """Call ``action`` on rank 0; return its result on every rank. Collective.

    If ``action`` raises an exception, every rank raises ``error`` with the message of that
    exception.
    """
    result, refusal, cause = None, None, None
    if comm.rank == 0:
        try:
            result = action()
        except Exception as own:
            cause, is_known = own, isinstance(own, HpctrainError | OSError)
            refusal = str(own) if is_known else f"{type(own).__name__}: {own}"
    result, refusal = comm.broadcast_object((result, refusal))
    if refusal is not None:
        raise error(refusal) from cause
    return result  # type: ignore[return-value]  # set, since ``action`` did not fail


def is_any(comm: "Communicator", *, mine: bool) -> bool:
    """Return whether ``mine`` is true on any rank. Collective; one small all-reduce."""
    return any(maxima(comm, [mine]))


def maxima(comm: "Communicator", numbers: list[int]) -> list[int]:
    """Return the element-wise maximum over all ranks of ``numbers`` below 2^63. Collective."""
    if comm.size == 1:
        return numbers
    import torch  # noqa: PLC0415 - slow, and commands for one process need no torch

    from hpctrain.comm.ops import Op  # noqa: PLC0415 - it needs torch

    largest = torch.tensor(numbers, dtype=torch.int64)
    comm.allreduce_(largest, op=Op.MAX).wait()
    return list(largest.tolist())


def refusals_of(comm: "Communicator", refusal: str | None) -> Sequence[str | None]:
    """Return the error messages of all ranks, by rank, or ``()`` if there are none. Collective.

    ``refusal`` is the error message of this rank, or None. The messages are gathered only if a
    rank has one.
    """
    return comm.allgather_object(refusal) if is_any(comm, mine=refusal is not None) else ()


def raise_if_refused(
    comm: "Communicator", refusal: str | None, error: type[HpctrainError] = MismatchError
) -> None:
    """Raise ``error`` on every rank if any rank passes an error message. Collective."""
    raise_if_any(refusals_of(comm, refusal), error)


def raise_if_any(
    refusals: Sequence[str | None], error: type[HpctrainError] = MismatchError
) -> None:
    """Raise ``error`` if ``refusals``, with one entry per rank, contain a message."""
    if any(message is not None for message in refusals):
        raise error(merge_messages(refusals))


def merge_messages(messages: Sequence[str | None]) -> str:
    """Return the common message of all ranks, or each different message with its ranks."""
    if messages[0] is not None and len(set(messages)) == 1:
        return messages[0]
    return by_rank(messages)


def require_equal(
    comm: "Communicator",
    lines: Sequence[str],
    what: str,
    remedy: str = "build the same model on every rank",
) -> None:
    """Raise unless ``lines`` are the same on every rank. Collective.

    Costs one small all-reduce if the lines are equal.

    Args:
        comm: the ranks.
        lines: texts of this rank, such as a name and a shape of each parameter.
        what: subject of the texts, for the message.
        remedy: remedy, for the message.

    Raises:
        MismatchError: texts differ; the message contains the first text that differs, by rank.
    """
    if not is_equal(comm, list(lines)):
        require_equal_by(comm.allgather_object, lines, what, remedy)


def is_equal(comm: "Communicator", value: object) -> bool:
    """Return whether the ``repr`` of the value is equal on all ranks. Collective."""
    return not places_of_differences(comm, [int(_digest(value)[:15], 16)])


def places_of_differences(comm: "Communicator", numbers: Iterable[int]) -> list[int]:
    """Return the indices, from 0, of the ``numbers`` that differ between ranks. Collective.

    The absolute values must be below 2^63. Costs one all-reduce, whose size does not depend on the
    number of ranks.
    """
    ends = iter(maxima(comm, [end for number in numbers for end in (number, -number)]))
    return [place for place, (top, low) in enumerate(zip(ends, ends, strict=True)) if top != -low]


def require_equal_by(
    gather: GatherObjects,
    lines: Sequence[str],
    what: str,
    remedy: str = "build the same model on every rank",
) -> None:
    """Raise as ``require_equal`` does; ``gather`` returns the objects of all ranks. Collective."""
    columns = gather_distinct(gather, list(lines))
    if not columns:
        return
    sent = {rank: column for rank, column in enumerate(columns) if column is not None}
    rows = zip_longest(*sent.values(), fillvalue="none")
    number, row = next((i, row) for i, row in enumerate(rows) if len(set(row)) > 1)
    of_rank = dict(zip(sent, row, strict=True))
    seen = [of_rank.get(rank) for rank in range(len(columns))]
    is_permuted = len({tuple(sorted(column)) for column in sent.values()}) == 1
    raise MismatchError(
        f"{what} must be the same on every rank, but "
        f"{'only the order of the entries differs, first at ' * is_permuted}entry {number}, "
        f"counted from 0{'' if is_permuted else ', differs'}: {by_rank(seen)}; {remedy}"
    )


def gather_distinct(gather: GatherObjects, mine: T, max_sent: int = _MAX_SENT) -> list[T | None]:
    """Return the values of all ranks, by rank; an empty list if all are equal. Collective.

    Values are equal if their ``repr`` is equal. If several ranks have equal values, only the
    lowest of these ranks sends the value. Only the first ``max_sent`` different values are sent;
    the list contains None for ranks with other values.
    """
    own = f"{_digest(mine)} {secrets.token_hex(8)}"  # different on each rank
    every = gather(own)
    digests = [text.split()[0] for text in every]
    if len(set(digests)) == 1:
        return []
    senders = [digests.index(one) for one in [*dict.fromkeys(digests)][:max_sent]]
    sent = gather(mine if every.index(own) in senders else None)
    by_digest = {digests[sender]: sent[sender] for sender in senders}
    return [by_digest.get(one) for one in digests]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def differing(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the names whose values differ between ranks, with their values by rank as text.

    Not collective. ``of_ranks`` has a dictionary from names to values for each rank. For each
    name, ranks that lack the name are ignored.
    """
    names = dict.fromkeys(name for values in of_ranks for name in values)
    found = {name: [values.get(name) for values in of_ranks] for name in names}
    return {name: by_rank(seen) for name, seen in found.items() if len({*seen} - {None}) > 1}
