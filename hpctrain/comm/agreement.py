"""All ranks raise, or none does."""

from collections.abc import Sequence

from hpctrain.errors import MismatchError


def raise_if_any(refusals: Sequence[str | None]) -> None:
    """Raise if a rank refused; ``refusals`` holds None or a message for every rank.

    Raises:
        MismatchError: names each message once, with the ranks that gave it.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, message in enumerate(refusals):
        if message is not None:
            ranks_of.setdefault(message, []).append(rank)
    if ranks_of:
        raise MismatchError("; ".join(f"{_ranks(r)}: {m}" for m, r in ranks_of.items()))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
