"""All ranks raise, or none does."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.core.errors import CommError, HpctrainError, MismatchError, RankLostError
from hpctrain.core.units import by_rank

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")


@contextmanager
def agreed(comm: "Communicator", error: type[HpctrainError] = MismatchError) -> Iterator[None]:
    """Leave the block only if no rank raised in it; else all ranks raise an ``error``.

    Collective at its end; what is collective inside must raise on all ranks or on none. The
    ``error`` says what the ranks raised: once if all said the same, else with the ranks. Ranks
    whose own error is none of ours, or is an ``error`` that all have, raise their own.
    """
    try:
        yield
    except RankLostError:
        raise  # there is nobody to agree with
    except HpctrainError as own:
        text = merge_messages(comm.allgather_object(str(own)))
        if isinstance(own, error) and text == str(own):
            raise
        raise error(text) from own
    except BaseException as own:
        # A rank that is lost as well is not what the user must hear of first.
        with suppress(CommError):
            comm.allgather_object(str(own) or type(own).__name__)
        raise
    raise_if_any(comm.allgather_object(None), error)


def on_root(
    comm: "Communicator", action: Callable[[], T], error: type[HpctrainError] = MismatchError
) -> T:
    """Run an action on rank 0; return its result on every rank. Collective.

    Every rank raises an ``error`` with what it raised of ours, or of the system (OSError).
    """
    result, refusal = None, None
    if comm.rank == 0:
        try:
            result = action()
        except (HpctrainError, OSError) as own:
            refusal = str(own)
    result, refusal = comm.broadcast_object((result, refusal))
    if refusal is not None:
        raise error(refusal)
    return result  # type: ignore[return-value]  # it did not fail


def raise_if_any(
    refusals: Sequence[str | None], error: type[HpctrainError] = MismatchError
) -> None:
    """Raise an ``error`` if a rank refused: by rank, ``refusals`` holds None or a message."""
    if any(message is not None for message in refusals):
        raise error(merge_messages(refusals))


def merge_messages(messages: Sequence[str | None]) -> str:
    """Return the message that all ranks gave, else each one once, with its ranks."""
    if messages[0] is not None and len(set(messages)) == 1:
        return messages[0]
    return by_rank(messages)


def require_equal(
    comm: "Communicator",
    lines: Sequence[str],
    what: str,
    way_out: str = "build the same model on every rank",
) -> None:
    """Return if every rank gives the same lines. Collective; sends a digest while all is well.

    ``MismatchError`` names the first line that differs, by rank.
    """
    require_equal_by(comm.allgather_object, lines, what, way_out)


def require_equal_by(
    gather: Callable[[Any], list[Any]],
    lines: Sequence[str],
    what: str,
    way_out: str = "build the same model on every rank",
) -> None:
    """Do what ``require_equal`` does by a function that returns the objects of all ranks."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(gather(digest))) == 1:
        return
    columns = gather(list(lines))
    rows = zip_longest(*columns, fillvalue="none")
    number, seen = next((i, row) for i, row in enumerate(rows) if len(set(row)) > 1)
    raise MismatchError(
        f"{what} must be the same on every rank, number {number} differs: {by_rank(seen)}; "
        f"{way_out}"
    )


def differing(of_ranks: Sequence[Mapping[str, str]], lacking: str | None = None) -> dict[str, str]:
    """Return by name what the ranks have, where they differ; ``lacking`` for those without.

    None: a rank without counts as none.
    """
    names = dict.fromkeys(name for values in of_ranks for name in values)
    found = {name: [values.get(name, lacking) for values in of_ranks] for name in names}
    return {name: by_rank(seen) for name, seen in found.items() if len({*seen} - {None}) > 1}
