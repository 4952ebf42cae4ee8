"""What every communicator can do; ``serial``, ``mpi`` and ``hierarchical`` implement it."""

from typing import Protocol, TypeVar

from torch import Tensor, dtype

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.work import Work

T = TypeVar("T")


class Communicator(Protocol):
    """A fixed group of ranks that move tensors.

    Every method but ``send``, ``recv_`` and ``close`` is collective: all ranks call it, in the
    same order. Tensors are on the CPU. A trailing ``_`` means in place. Sums are formed in the
    same order in every run of a plan, so all ranks hold the same bits, run after run.
    """

    rank: int
    size: int

    def allreduce_(self, tensor: Tensor | Bucket, *, scale: float | None = None) -> Work:
        """Replace ``tensor`` by its sum over all ranks, times ``scale``.

        Args:
            tensor: the same shape and dtype on every rank, any layout; any size, also empty.
                A ``Bucket`` of ``new_bucket`` is reduced where it lies, without a copy.
            scale: factor of the sum, applied while it is written; floating point only.

        Raises:
            CommError: the dtype cannot be summed, or ``scale`` is given for integers.
            RankLostError: another rank died or left the program meanwhile.
        """

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:
        """Replace ``tensor`` by that of rank ``root``."""

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Return the (picklable) ``value`` of rank ``root`` on every rank."""

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """Return the values of all ranks, by rank, on ``root`` and None elsewhere."""

    def allgather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank."""

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dest``, which calls ``recv_`` with the same tag."""

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Replace ``tensor`` by what rank ``source`` sends with the same tag."""

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001 - reads as a sentence
        """Return if every rank says ok; otherwise every rank raises.

        Raises:
            MismatchError: some rank said no; names those ranks and their messages.
        """

    def new_bucket(self, numel: int, dtype: dtype) -> Bucket:
        """Make a bucket of ``numel`` zeros, in memory shared by the node where that is possible.

        Raises:
            NodeMemoryError: there is not enough memory for it; on every rank.
        """

    def close(self) -> None:
        """Give back what this communicator holds; it cannot be used afterwards."""
