"""The protocol of communicators."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, dtype

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.control_channel.mailbox import Mailbox
from hpctrain.comm.operation_result import Traffic, Work
from hpctrain.comm.ops import Op, scale_

if TYPE_CHECKING:
    from hpctrain.comm.node.shared_memory import SharedMemory

T = TypeVar("T")

GATHER = "gather of objects everywhere"


class Internode(Protocol):
    """The ranks, one of each node, that reduce the same slice of a bucket between the nodes."""

    rank: int
    size: int

    def allreduce_(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Work:
        """Replace ``tensor`` by its sum over these ranks, times ``scale``. Collective."""

    def start_alltoall(
        self, tensors: Sequence[Tensor], numels: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Start to send flat ``tensors[r]``, all of one dtype, to rank r.

        Collective. Several may be in flight if all ranks start them in the same order.

        Returns:
            A function that waits, and returns what each rank r sent here, ``numels[r]`` elements.
        """


class Communicator(Protocol):
    """A fixed group of ranks that move tensors.

    Every method but ``send``, ``recv_``, ``fail``, ``traffic``, ``before_close`` and ``close`` is
    collective: all ranks call it, in the same order. Tensors are dense and on the CPU, of any
    dtype that torch calculates with, of any layout and size, also empty and scalar. A trailing
    ``_`` means in place.
    Reductions are formed in the same order in every run of a plan, so all ranks hold the same
    bits, run after run.

    Every method that waits for others raises ``RankLostError`` if one of them died or left the
    program meanwhile, or kept it waiting for longer than ``HPCTRAIN_TIMEOUT``.

    Ranks that make different calls all raise ``MismatchError``. One exception: the reductions of
    several nodes compare inside each node only, and between nodes what fits by its size passes.

    A codec replaces the middle of a bucket's all-reduce::

        part = comm.reduce_node(bucket)       # sum of this rank's slice over its node
        if comm.internode is not None:
            comm.internode.allreduce_(part)   # sum over the nodes
        comm.publish(bucket)                  # the slices of all ranks, in every bucket

    Without node memory each rank counts as a node, and its slice is the whole bucket. Where
    operations run on a thread, call these on that thread, by ``start_on``.
    """

    rank: int
    size: int
    node: "SharedMemory | None" = None
    """Memory that the ranks of this node share; None if they share none."""
    num_rails: int = 1
    """Ranks of each node that send between nodes; 0 if all ranks share one memory."""

    @property
    def internode(self) -> Internode | None:
        """The ranks with the same slice on all nodes; None if another rank sends this slice."""
        return self

    @property
    def node_ranks(self) -> Sequence[int]:
        """Ranks that share memory with this one, by local rank."""
        return (self.rank,)

    def part_of(self, bucket: Bucket) -> Tensor:
        """Return the slice of a bucket that this rank sends between nodes. Not collective."""
        return bucket.flat

    def reduce_node(self, bucket: Bucket, *, scale: float | None = None) -> Tensor:
        """Sum a bucket inside the node, times ``scale``.

        Returns:
            The part that this rank sends between nodes; empty if it sends none.
        """
        if scale is not None:
            scale_(bucket.flat, scale)
        return self.part_of(bucket)

    def publish(self, bucket: Bucket, *, scale: float | None = None) -> None:
        """Write the slices of the node's ranks, times ``scale``, into the bucket of each."""
        if scale is not None:
            scale_(bucket.flat, scale)

    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Replace ``tensor`` by its sum over all ranks, times ``scale``.

        Args:
            tensor: the same shape and dtype on every rank.
                A ``Bucket`` of ``new_bucket`` is reduced where it lies, without a copy.
            op: another operation than the sum. Integers wrap around; NaN stays NaN.
            scale: factor of the result; floating point and complex only.

        Raises:
            CommError: ``op`` has no meaning for this dtype, or ``scale`` is given for integers.
            MismatchError: the ranks give different numbers of elements, dtypes or operations.
        """

    def allreduce(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Tensor:
        """Return the sum of ``tensor`` over all ranks, times ``scale``, as ``allreduce_`` does.

        Returns:
            A new contiguous tensor of the same shape.
        """
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.allreduce_(result, op=op, scale=scale).wait()
        return result

    def reduce_scatter(
        self,
        tensor: Tensor,
        *,
        op: Op = Op.SUM,
        scale: float | None = None,
        numels: Sequence[int] | None = None,
    ) -> Tensor:
        """Return this rank's part of the sum of ``tensor`` over all ranks, times ``scale``.

        Args:
            tensor: the same shape and dtype on every rank; cut in the order of its elements.
            op: another operation than the sum.
            scale: factor of the result; floating point and complex only.
            numels: elements of each rank's part, the same on every rank; None for parts as even
                as possible, the first ones larger.

        Returns:
            A new flat tensor.

        Raises:
            CommError: as ``allreduce_``, or ``numels`` does not cover the tensor.
            MismatchError: as ``allreduce_``, or ``numels`` differs between ranks.
        """

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, as new contiguous tensors.

        Args:
            tensor: of the same dtype on every rank; shapes may differ, also in their number of
                dimensions.

        Raises:
            MismatchError: the ranks give different dtypes.
        """

    def alltoall(self, tensors: Sequence[Tensor], call: str = "") -> list[Tensor]:
        """Send ``tensors[r]`` to rank r; return what the ranks have sent here, by rank.

        Args:
            tensors: one for each rank, all of one dtype, the same on every rank; any shapes.
            call: text that the ranks compare first, by default that of an alltoall of the dtype.

        Returns:
            New contiguous tensors in the shapes of their senders.

        Raises:
            CommError: there is not one tensor for each rank, or they differ in dtype.
            MismatchError: the ranks give different dtypes.
        """

    def start_alltoall(
        self, tensors: Sequence[Tensor], numels: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Exchange tensors as ``alltoall``; see ``Internode``."""
        del numels
        arrived = self.alltoall(tensors)
        return lambda: arrived

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:
        """Replace ``tensor`` by that of rank ``root``.

        Args:
            tensor: the same shape and dtype on every rank.
            root: a rank.

        Raises:
            CommError: ``root`` is no rank.
            MismatchError: the ranks give different numbers of elements, dtypes or roots.
        """

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Return the (picklable) ``value`` of rank ``root`` on every rank."""

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """Return the values of all ranks, by rank, on ``root`` and None elsewhere."""

    def allgather_object(self, value: T, call: str = GATHER) -> list[T]:
        """Return the values of all ranks, by rank, on every rank; ``call`` is what for."""

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dest``, which calls ``recv_`` with the same tag."""

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Replace ``tensor`` by what rank ``source`` sends with the same tag.

        Raises:
            CommError: ``source`` sends more or less than ``tensor`` holds.
        """

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001 - reads as a sentence
        """Return if every rank says ok; otherwise every rank raises.

        Raises:
            MismatchError: some rank said no; names those ranks and their messages.
        """

    def group(self, ranks: Sequence[int]) -> "Communicator | None":
        """Make a communicator of some of the ranks. All ranks of this one call it.

        Args:
            ranks: of this communicator, each once, the same on every rank; the group numbers
                them anew, from 0, in this order.

        Returns:
            None on ranks that are not in the group.

        Raises:
            CommError: ``ranks`` is empty, names a rank twice or one that does not exist.
            MismatchError: the ranks name different groups.
        """

    def new_mailbox(self) -> Mailbox:
        """Make mailboxes between the ranks; each call makes others.

        They may be used beside the operations of this communicator, from another thread too
        where MPI allows it.

        Raises:
            NodeMemoryError: there is not enough memory for them; on every rank of the node.
        """

    def new_bucket(self, numel: int, dtype: dtype) -> Bucket:
        """Make a bucket of ``numel`` zeros, in memory shared by the node where that is possible.

        Raises:
            NodeMemoryError: there is not enough memory for it; on every rank.
        """

    def fail(self) -> None:
        """Let later calls raise, on all ranks: an error has ended a call of this rank halfway.

        Not collective.
        """
        return

    def traffic(self) -> Traffic:
        """Return what this rank has moved so far. Not collective."""

    def before_close(self, function: Callable[[], object]) -> None:
        """Call a function in ``close``, before what it may need is freed."""
        del function

    def close(self) -> None:
        """Give back what this communicator holds; it cannot be used afterwards."""
