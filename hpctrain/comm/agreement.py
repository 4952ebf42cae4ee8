"""All ranks raise, or none does."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from hpctrain.core.errors import MismatchError
from hpctrain.core.units import format_ranks

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


def raise_if_any(refusals: Sequence[str | None]) -> None:
    """Raise if a rank refused; ``refusals`` holds None or a message for every rank.

    Raises:
        MismatchError: names each message once, with the ranks that gave it.
    """
    if any(message is not None for message in refusals):
        raise MismatchError(by_rank(refusals))


def require_equal(
    comm: "Communicator",
    lines: Sequence[str],
    what: str,
    way_out: str = "build the same model on every rank",
) -> None:
    """Return if every rank gives the same lines. Collective; sends a digest while all is well.

    Raises:
        MismatchError: names the first line that differs, by rank.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(comm.allgather_object(digest))) == 1:
        return
    columns = comm.allgather_object(list(lines))
    rows = zip_longest(*columns, fillvalue="none")
    number, seen = next((i, row) for i, row in enumerate(rows) if len(set(row)) > 1)
    raise MismatchError(
        f"{what} must be the same on every rank, number {number} differs: {by_rank(seen)}; "
        f"{way_out}"
    )


def by_rank(messages: Sequence[str | None]) -> str:
    """Name each message once, with the ranks that gave it; None is no message."""
    ranks_of: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            ranks_of.setdefault(message, []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {message}" for message, ranks in ranks_of.items())
