"""The communicator of a world of one rank, without communication."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from hpctrain.comm.agreement import raise_if_any
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import GATHER, Communicator
from hpctrain.comm.control_channel import mailbox
from hpctrain.comm.operation_result import FINISHED, Traffic, Work
from hpctrain.comm.ops import Op, combination, scale_
from hpctrain.comm.tensor_arguments import (
    check_alltoall,
    check_group,
    check_rank,
    check_scale,
    check_tensor,
    flat_of,
    part_numels,
)
from hpctrain.comm.waiting import Watch
from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")


class SerialCommunicator(Communicator):
    """A communicator of a single process; ``Communicator`` documents the methods."""

    rank = 0
    size = 1

    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Scale ``tensor``, which is its own sum."""
        values = tensor.flat if isinstance(tensor, Bucket) else tensor
        check_scale(values, scale)
        combination(values.dtype, op)
        if scale is not None and scale != 1.0:
            scale_(values.detach(), scale)
        return FINISHED

    def reduce_scatter(
        self,
        tensor: Tensor,
        *,
        op: Op = Op.SUM,
        scale: float | None = None,
        numels: Sequence[int] | None = None,
    ) -> Tensor:
        """Return a scaled 1-D copy of ``tensor``."""
        part_numels(tensor.numel(), 1, numels)
        return flat_of(self.allreduce(tensor, op=op, scale=scale))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a copy of ``tensor``, in a list."""
        check_tensor(tensor)
        return [flat_of(tensor).clone().view(tensor.shape)]

    def alltoall(self, tensors: Sequence[Tensor], call: str = "") -> list[Tensor]:
        """Return a copy of the only tensor, in a list."""
        del call
        check_alltoall(tensors, 1)
        return self.all_gather(tensors[0])

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:
        """No-op: this rank is the root."""
        check_tensor(tensor)
        check_rank(root, 1, "root")
        return FINISHED

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Return ``value``."""
        check_rank(root, 1, "root")
        return value

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """Return ``[value]``."""
        check_rank(root, 1, "root")
        return [value]

    def allgather_object(self, value: T, call: str = GATHER) -> list[T]:
        """Return ``[value]``."""
        del call
        return [value]

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> NoReturn:
        """Raise ``CommError``: there is no other rank."""
        del tensor
        raise CommError(
            f"a world must have two ranks or more to send, got one; dest={dest}, tag={tag}"
        )

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> NoReturn:
        """Raise ``CommError``: there is no other rank."""
        del tensor
        raise CommError(
            f"a world must have two ranks or more to receive, got one; {source=}, {tag=}"
        )

    def barrier(self) -> None:
        """No-op: there is no other rank."""

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001 - reads as a sentence
        """Raise ``MismatchError`` with ``message`` unless ``ok`` is true."""
        raise_if_any([None if ok else message])

    def group(self, ranks: Sequence[int]) -> "SerialCommunicator":
        """Return this communicator."""
        check_group(ranks, 1)
        return self

    def new_mailbox(self) -> mailbox.Mailbox:
        """Create a mailbox without neighbours."""
        return mailbox.alone()

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Create a bucket in private memory."""
        return Bucket(torch.zeros(numel, dtype=dtype))

    def traffic(self) -> Traffic:
        """Return zeros."""
        return Traffic()

    def close(self) -> None:
        """No-op: there are no resources to free."""


class SerialNode(SerialCommunicator):
    """A single process with node memory, for code that requires it.

    Raises:
        NodeMemoryError: the memory cannot be allocated.
    """

    num_rails = 0

    def __init__(self) -> None:
        from hpctrain.comm.node.shared_memory import SharedMemory  # noqa: PLC0415 - needs MPI

        alone = cast("MPI.Intracomm", _Alone())
        self.node: SharedMemory = SharedMemory(alone, spin=False, watch=Watch(), stage_bytes=1)

    @property
    def internode(self) -> None:
        """None, because there is no other node."""

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Create a bucket in node memory."""
        return self.node.new_bucket(numel, dtype)


class _Alone:
    """Replaces the MPI communicator that ``SharedMemory`` requires, for one rank."""

    rank, size = 0, 1
