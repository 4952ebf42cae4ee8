"""Ranks that have nothing left take part all the same: ``join``."""

from hpctrain.runtime.operations.arguments import controller_of


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's
    """Take part in the operations of the others with nothing, until all ranks have called this.

    For ranks that have less data than others. Meanwhile they count as ranks: they contribute zeros
    to sums and averages, no rows to gathers. Every operation works but a broadcast from a rank
    that has joined. Collective in the end.

    Args:
        device: Horovod's, for its GPU buffers; without effect.

    Returns:
        The rank that came last, the same on every rank.

    Raises:
        RankLostError: another rank died or left.
    """
    return controller_of(None).join()
