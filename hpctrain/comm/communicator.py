"""The protocol of communicators, and what their methods give: works, counters."""

import os
from collections.abc import Callable, Sequence
from operator import sub
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, dtype

from hpctrain.comm.agreement import raise_if_any
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.control_channel.mailbox import Mailbox
from hpctrain.comm.ops import Op
from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from hpctrain.comm.hierarchical import HierarchicalCommunicator

T = TypeVar("T")

GATHER = "gather of objects everywhere"


class Traffic(NamedTuple):
    """Counters of one rank since the communicator was made."""

    node_bytes: int = 0  # bytes that this rank has read or written in the memory of its node
    rail_bytes: int = 0
    """Bytes that this rank has sent by messages; inside an MPI library the bytes of its calls."""
    waited_s: float = 0.0  # seconds in which this rank waited for others
    rail_s: float = 0.0  # seconds that this rank spent on its rail between nodes without waiting

    def since(self, earlier: "Traffic") -> "Traffic":
        """Return what was added after ``earlier``."""
        return Traffic(*map(sub, self, earlier))


class Work(Protocol):
    """An operation that was started; on CPU its result may be read after ``wait()``."""

    def wait(self) -> None:
        """Return when the result is there; raise what the operation raised."""

    def done(self) -> bool:
        """Say whether ``wait()`` would return at once."""


class Finished:
    """The work of an operation that was complete when it returned."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Say yes."""
        return True


FINISHED = Finished()


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
    """

    rank: int
    size: int

    @property
    def levels(self) -> "HierarchicalCommunicator | None":
        """The steps of a bucket's all-reduce; None where nobody shares memory.

        Where operations have a thread, the steps are for what runs on it, see ``start_on``.
        """
        return None

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
        raise_if_any(self.allgather_object(None if ok else message))

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

    def mail(self) -> Mailbox:
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


class _Process:
    """This process: to ask the system for its number with every call takes a tenth of it."""

    def __init__(self) -> None:
        self.look()
        os.register_at_fork(after_in_child=self.look)

    def look(self) -> None:
        """Learn the number, of a child a new one."""
        self.pid = os.getpid()


_process = _Process()


class Owner:
    """The process that made something which other ranks wait for."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = _process.pid

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return _process.pid == self._pid

    def check(self) -> None:
        """Raise ``CommError`` in a forked child: its messages would be taken for its parent's."""
        if _process.pid != self._pid:
            raise CommError(
                f"ranks communicate by the process that has called init(), here {self._pid}, this "
                f"is {os.getpid()}, a child forked from it, such as a worker of a DataLoader; "
                "communicate in the training loop, and let workers prepare samples only"
            )
