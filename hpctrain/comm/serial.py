"""A world of one rank: nothing moves, and nothing is scaled."""

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
    """The communicator of a single process; see ``Communicator`` for the methods."""

    rank = 0
    size = 1

    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Scale ``tensor``: the sum over one rank is already there."""
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
        """Scale a flat copy: the only part is all of it."""
        part_numels(tensor.numel(), 1, numels)
        return flat_of(self.allreduce(tensor, op=op, scale=scale))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a copy."""
        check_tensor(tensor)
        return [flat_of(tensor).clone().view(tensor.shape)]

    def alltoall(self, tensors: Sequence[Tensor], call: str = "") -> list[Tensor]:
        """Return a copy of the only tensor."""
        del call
        check_alltoall(tensors, 1)
        return self.all_gather(tensors[0])

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:
        """Leave ``tensor`` as it is."""
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
        """Refuse: there is nobody to send to."""
        del tensor
        raise CommError(f"a world of one rank has nobody to talk to, got dest={dest}, tag={tag}")

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> NoReturn:
        """Refuse: there is nobody to receive from."""
        del tensor
        raise CommError(f"a world of one rank has nobody to hear, got source={source}, tag={tag}")

    def barrier(self) -> None:
        """Return at once."""

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001 - reads as a sentence
        """Raise the message of this rank."""
        raise_if_any([None if ok else message])

    def group(self, ranks: Sequence[int]) -> "SerialCommunicator":
        """Return this communicator: there is no other group."""
        check_group(ranks, 1)
        return self

    def new_mailbox(self) -> mailbox.Mailbox:
        """Make mailboxes without neighbours."""
        return mailbox.alone()

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket in private memory."""
        return Bucket(torch.zeros(numel, dtype=dtype))

    def traffic(self) -> Traffic:
        """Return zeros."""
        return Traffic()

    def close(self) -> None:
        """Hold nothing, give back nothing."""


class SerialNode(SerialCommunicator):
    """A process alone, with the node memory in which the ranks of a node share what they have."""

    num_rails = 0

    def __init__(self) -> None:
        """Take the memory. Raises ``NodeMemoryError``: there is none."""
        from hpctrain.comm.node.shared_memory import SharedMemory  # noqa: PLC0415 - needs MPI

        alone = cast("MPI.Intracomm", _Alone())
        self.node: SharedMemory = SharedMemory(alone, spin=False, watch=Watch(), stage_bytes=1)

    @property
    def internode(self) -> None:
        """No other node."""

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket in node memory."""
        return self.node.new_bucket(numel, dtype)


class _Alone:
    """What ``SharedMemory`` asks of the ranks of a node, without MPI."""

    rank, size = 0, 1
