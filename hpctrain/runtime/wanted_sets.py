"""The process sets that ranks ask for: put together and checked, on every rank alike; pure."""

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.comm.agreement import by_rank
from hpctrain.core.errors import ConfigError, MismatchError


class Wanted(NamedTuple):
    """A process set that a rank asks for."""

    ranks: tuple[int, ...]
    """Of the world, sorted."""
    by_communicator: bool
    """Whether the ranks are those of a communicator, of which each rank of the world has its own:
    then there are as many sets as communicators."""


def agreed(lists: Sequence[Sequence[Wanted]]) -> list[tuple[int, ...]]:
    """Return the sets that all ranks ask for, in the order of their numbers.

    As in Horovod, those of communicators come before those of ranks.

    Args:
        lists: what each rank asks for, by rank.

    Raises:
        MismatchError: they ask for different sets.
    """
    shown = [
        ", ".join("a communicator" if by else str(list(ranks)) for ranks, by in wanted)
        for wanted in lists
    ]
    if len(set(shown)) > 1:
        raise MismatchError(
            f"all ranks must register the same process sets in the same order, got "
            f"{by_rank(shown)}"
        )
    columns = list(zip(*lists, strict=True))
    of_comms = [sorted({one.ranks for one in c}) for c in columns if c[0].by_communicator]
    of_ranks = [c[0].ranks for c in columns if not c[0].by_communicator]
    return [*(ranks for sets in of_comms for ranks in sets), *of_ranks]


def check_ranks(ranks: Sequence[int], size: int) -> None:
    """Refuse a set that is empty, or names a rank twice or one that does not exist.

    Raises:
        ConfigError: it does.
    """
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
        raise ConfigError(
            f"a process set has one or more ranks from 0 to {size - 1}, each once, got "
            f"{list(ranks)}"
        )
