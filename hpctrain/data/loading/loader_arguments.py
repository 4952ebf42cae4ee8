"""Arguments of a loader: what each may be, and which go together."""

from collections.abc import Mapping

from hpctrain.core.errors import DataError
from hpctrain.data.loading.steps import Tail


def check_choice(name: str, value: str, *choices: str) -> None:
    """Raise a ``DataError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise DataError(f"{name} is one of {', '.join(choices)}, got {value!r}")


def check_numbers(
    positive: Mapping[str, int], *, workers: int, worker_timeout_s: float, rank: int, size: int
) -> None:
    """Raise a ``DataError`` for the first number that is too small or too large.

    Args:
        positive: numbers that are at least 1, by name.
        workers: 0 or more.
        worker_timeout_s: above 0.
        rank: of this process.
        size: number of ranks.
    """
    for name, number in positive.items():
        if number < 1:
            raise DataError(f"{name} must be positive, got {number}")
    if workers < 0:
        raise DataError(f"workers is a number of processes or 0, got {workers}")
    if not worker_timeout_s > 0:
        raise DataError(f"worker_timeout_s is positive, inf for no limit, got {worker_timeout_s}")
    if not 0 <= rank < size:
        raise DataError(f"rank must be in [0, size), got rank {rank} of {size}")


def check_micro_shards(micro_shards: int | None, *, size: int, tail: Tail, skips: bool) -> None:
    """Raise a ``DataError`` if the parts of a global batch would depend on the number of ranks.

    Args:
        micro_shards: fixed parts of a global batch; None for one per rank.
        size: number of ranks.
        tail: what becomes of the last samples of an epoch.
        skips: whether damaged samples are left out.
    """
    if micro_shards is None:
        return
    if micro_shards < size:
        raise DataError(
            f"every rank needs a micro-shard, got micro_shards = {micro_shards} on {size} ranks; "
            f"take more, or fewer ranks"
        )
    if tail == "wrap" or skips:
        raise DataError(
            "micro_shards are fixed parts of a global batch, which samples that are left out or "
            "repeated would move; use on_corrupt='raise' and tail='short' or 'drop'"
        )
