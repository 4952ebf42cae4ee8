"""The interface of communicators: collective and point-to-point operations on tensors."""

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
    """The ranks, one per node, that reduce the same slice of a bucket between nodes."""

    rank: int
    size: int

    def allreduce_(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Work:
        """Replace ``tensor`` by its sum over these ranks, times ``scale``. Collective."""

    def start_alltoall(
        self, tensors: Sequence[Tensor], numels: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Start an exchange that sends ``tensors[r]`` to rank r.

        Collective. Several exchanges may be in flight if all ranks start them in the same order.

        Args:
            tensors: one flat tensor per rank, all of one dtype.
            numels: number of elements received from each rank.

        Returns:
            A function that waits and returns the received tensors, by rank.
        """


class Communicator(Protocol):
    """A fixed group of ranks with collective operations on tensors.

    Every method except ``part_of``, ``send``, ``recv_``, ``fail``, ``rejoin``, ``traffic``,
    ``before_close`` and ``close`` is collective: all ranks call it, in the same order. Tensors are
    dense and on the CPU. Every dtype that torch can calculate with, every layout and every size,
    including empty and scalar tensors, is accepted. A trailing ``_`` means in place.
    Reductions combine the values of the ranks in an order that the plan fixes, so results are
    bitwise identical on all ranks and in all runs with the same plan.

    Every method that waits for other ranks raises ``RankLostError`` if one of them died, left the
    program, or was late by more than ``HPCTRAIN_TIMEOUT``.

    If ranks make different calls, all raise ``MismatchError``, then and in each later call until
    ``rejoin``. Exception: reductions across nodes compare calls only within each node; between
    nodes, a difference that leaves the message sizes equal is not detected.

    A codec, which compresses gradients, replaces the second step of a bucket's all-reduce::

        part = comm.reduce_node(bucket)       # sum of this rank's slice over its node
        if comm.internode is not None:
            comm.internode.allreduce_(part)   # sum over the nodes
        comm.publish(bucket)                  # copy the slices of all ranks to every bucket

    Without node memory each rank counts as a node, and its slice is the whole bucket. If
    operations run on a thread, a codec must call these functions on that thread, by ``start_on``.
    """

    rank: int
    size: int
    node: "SharedMemory | None" = None
    """Memory shared by the ranks of this node; None if the ranks share none."""
    num_rails: int = 1
    """Number of ranks per node that send between nodes; 0 if all ranks are on one node."""

    @property
    def internode(self) -> Internode | None:
        """Ranks of all nodes that reduce this rank's slice; None if this rank sends no slice."""
        return self

    @property
    def node_ranks(self) -> Sequence[int]:
        """Ranks that share memory with this rank, by local rank."""
        return (self.rank,)

    def part_of(self, bucket: Bucket) -> Tensor:
        """Return the slice of a bucket that this rank sends between nodes. Not collective."""
        return bucket.flat

    def reduce_node(self, bucket: Bucket, *, scale: float | None = None) -> Tensor:
        """Sum this rank's slice of a bucket over the ranks of the node, times ``scale``.

        Returns:
            The slice that this rank sends between nodes; empty if this rank sends no slice.
        """
        if scale is not None:
            scale_(bucket.flat, scale)
        return self.part_of(bucket)

    def publish(self, bucket: Bucket, *, scale: float | None = None) -> None:
        """Copy the slice of each rank of the node, times ``scale``, to all buckets of the node."""
        if scale is not None:
            scale_(bucket.flat, scale)

    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Replace ``tensor`` by its sum over all ranks, times ``scale``.

        Args:
            tensor: the same shape and dtype on every rank.
                A ``Bucket`` from ``new_bucket`` is reduced in place, without a copy.
            op: operation. Integer overflow wraps around; NaN is propagated.
            scale: factor of the result; for floating-point and complex dtypes only.

        Raises:
            CommError: ``op`` is not defined for the dtype, or ``scale`` is given for integers.
            MismatchError: number of elements, dtype or operation differ between ranks.
        """

    def allreduce(self, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None) -> Tensor:
        """Return the sum of ``tensor`` over all ranks, times ``scale``; see ``allreduce_``.

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
            tensor: the same shape and dtype on every rank; divided in the order of its elements.
            op: operation.
            scale: factor of the result; for floating-point and complex dtypes only.
            numels: number of elements of each rank's part, the same on every rank; None for
                parts whose sizes differ by at most one, larger parts first.

        Returns:
            A new flat tensor.

        Raises:
            CommError: as for ``allreduce_``, or ``numels`` does not cover the tensor.
            MismatchError: as for ``allreduce_``, or ``numels`` differs between ranks.
        """

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, as new contiguous tensors.

        Args:
            tensor: the same dtype on every rank; shapes and numbers of dimensions may differ.

        Raises:
            MismatchError: the dtype differs between ranks.
        """

    def alltoall(self, tensors: Sequence[Tensor], call: str = "") -> list[Tensor]:
        """Send ``tensors[r]`` to rank r; return the received tensors, by rank.

        Args:
            tensors: one per rank, of any shapes, all of one dtype that is the same on every rank.
            call: description of the call that the ranks compare first.

        Returns:
            New contiguous tensors with the shapes that the senders gave.

        Raises:
            CommError: there is not one tensor per rank, or their dtypes differ.
            MismatchError: the dtype differs between ranks.
        """

    def start_alltoall(
        self, tensors: Sequence[Tensor], numels: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Start an all-to-all exchange; see ``Internode.start_alltoall``."""
        del numels
        arrived = self.alltoall(tensors)
        return lambda: arrived

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:
        """Replace ``tensor`` by the tensor of rank ``root``.

        Args:
            tensor: the same shape and dtype on every rank.
            root: rank that sends.

        Raises:
            CommError: ``root`` is not a rank.
            MismatchError: number of elements, dtype or root differ between ranks.
        """

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Send the picklable ``value`` of rank ``root`` to every rank, and return this value."""

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """Return the values of all ranks, by rank, on rank ``root``; None on other ranks."""

    def allgather_object(self, value: T, call: str = GATHER) -> list[T]:
        """Return the values of all ranks, by rank.

        The ranks first compare ``call``, a description of the purpose.
        """

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send ``tensor`` to rank ``dest``, which calls ``recv_`` with the same tag."""

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Replace ``tensor`` by the tensor that rank ``source`` sends with the same tag.

        Raises:
            CommError: the size of the message differs from the size of ``tensor``.
        """

    def barrier(self) -> None:
        """Wait until every rank has called this method."""

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001 - reads as a sentence
        """Raise on every rank unless ``ok`` is true on every rank.

        Raises:
            MismatchError: ``ok`` is false on some ranks; the error lists these ranks and their
                messages.
        """

    def group(self, ranks: Sequence[int]) -> "Communicator | None":
        """Create a communicator of some ranks. All ranks of this communicator call the method.

        Args:
            ranks: ranks of this communicator, each at most once, the same list on every rank.
                The group numbers its ranks from 0 in this order.

        Returns:
            None on ranks that are not in the group.

        Raises:
            CommError: ``ranks`` is empty, or contains a duplicate or an invalid rank.
            MismatchError: ``ranks`` differs between ranks.
        """

    def new_mailbox(self) -> Mailbox:
        """Create a mailbox between the ranks, separate from earlier mailboxes.

        The mailbox may be used concurrently with the operations of this communicator, also from
        another thread if MPI allows it.

        Raises:
            NodeMemoryError: not enough memory; on every rank of the node.
        """

    def new_bucket(self, numel: int, dtype: dtype) -> Bucket:
        """Create a bucket of ``numel`` zeros, in memory shared by the node if available.

        Raises:
            NodeMemoryError: not enough memory; on every rank.
        """

    def fail(self) -> None:
        """Mark this communicator as failed, so that later calls raise on all ranks.

        Called after an error has interrupted a collective on this rank. Not collective.
        """
        return

    def rejoin(self) -> None:
        """Allow calls again after a ``MismatchError`` for different calls. Not collective.

        The next call of every rank must be the same; without this method the rank raises the
        error again in each call.
        """
        return

    def traffic(self) -> Traffic:
        """Return the counters of bytes and seconds of this rank. Not collective."""

    def before_close(self, function: Callable[[], object]) -> None:
        """Register a function that ``close`` calls before it frees resources. Not collective."""
        del function

    def close(self) -> None:
        """Free the resources of this communicator, which cannot be used afterwards."""
