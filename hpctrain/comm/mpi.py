"""Flat communicator: MPI collectives over all ranks, or messages if MPI lacks the operation."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from hpctrain.comm.agreement import raise_if_refused
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.call_check import call_of, check_call, in_step, tensor_call
from hpctrain.comm.communicator import GATHER, Communicator
from hpctrain.comm.control_channel import mailbox
from hpctrain.comm.member_sync import MemberSync
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.operation_result import FINISHED, Traffic, Work
from hpctrain.comm.ops import Combination, Op, combination, finish
from hpctrain.comm.owner import Owner
from hpctrain.comm.rail.algorithms import (
    allgather_by_messages,
    allreduce_by_messages_,
    pairwise_alltoall_,
    pairwise_reduce_scatter,
)
from hpctrain.comm.rail.rail import CHUNK_ELEMENTS, MpiWire, buffer_of, bytes_of, library_sums
from hpctrain.comm.survivors import use
from hpctrain.comm.tensor_arguments import (
    check_alltoall,
    check_group,
    check_rank,
    check_scale,
    check_tensor,
    flat_of,
    flattened,
    name_of,
    part_numels,
)
from hpctrain.comm.waiting import Limit, Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.checks import require_open
from hpctrain.core.errors import CommError

T = TypeVar("T")

MakeGroup = Callable[[MPI.Intracomm, Sequence[int], Limit | None], Communicator]
"""Creates the communicator of a group; collective over the group.

The arguments are the MPI communicator of the group, which the result owns, the ranks of the group
in the parent communicator, and the limit of waits, None for the limit of the parent."""

NUM_TAGS = 32767  # the standard guarantees tags up to 32767

_count = count()


class MpiCommunicator(Communicator):
    """A communicator that uses MPI only, without node memory.

    ``Communicator`` documents the methods.

    Before each operation the ranks compare their calls by a nonblocking all-reduce. A rank that
    waits for a late rank sleeps, and raises if a rank is lost.

    Args:
        comm: ranks of this communicator. No other code may use it; ``close`` frees it.
        watch: performs all waits; by default without detection of lost ranks and without timeout.
        make_group: creates the communicators of groups; by default flat communicators.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        watch: Watch | None = None,
        make_group: MakeGroup | None = None,
    ) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._watch = watch or Watch()
        self._world_ranks = self._watch.ranks or range(comm.size)
        self._watch.record_calls(self._world_ranks)
        self.wire = MpiWire(comm, watch=self._watch)
        self._watch.on_fail.append(self.wire.withdraw_receives)
        self._comm = comm
        use(comm)
        self._calls = WatchedCalls(comm, self._watch)
        if self._watch.number is None:
            unique = self._world_ranks[self.rank] << 32 | next(_count)
            self._watch.number = self._calls.bcast(unique)
        self._member_sync = MemberSync()
        self._make_group = make_group or self._make_flat_group
        self._library_bytes = 0
        self._num_buckets = 0
        self._wires: list[MPI.Intracomm] = []
        self._before_close: list[Callable[[], object]] = []
        self._owner = Owner()
        self._has_left_messages = False
        """True while a group is being created, and after its creation failed. In this state
        messages may arrive later, so that ``close`` does not free the MPI communicator: MPI could
        give its context to a new communicator, which would receive these messages."""

    # -- reductions -------------------------------------------------------------------------

    @in_step
    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Reduce in chunks, by MPI if MPI can sum the dtype, otherwise by messages."""
        values = tensor.flat if isinstance(tensor, Bucket) else tensor
        check_scale(values, scale)
        how = combination(values.dtype, op)
        where = f" in bucket {tensor.number}" if isinstance(tensor, Bucket) else ""
        call = tensor_call(op, values.dtype, values.numel(), scale)
        self.check_call(f"allreduce by {call.text}{where}")
        with flattened(values) as flat:
            for chunk in how.view(flat).split(CHUNK_ELEMENTS):
                total = chunk.to(how.accumulate_dtype)
                self._allreduce_wide_(total, how.widened())
                finish(total, scale, chunk)
        return FINISHED

    @in_step
    def reduce_scatter(
        self,
        tensor: Tensor,
        *,
        op: Op = Op.SUM,
        scale: float | None = None,
        numels: Sequence[int] | None = None,
    ) -> Tensor:
        """Reduce by MPI if MPI can sum the dtype, otherwise by pairwise exchange."""
        check_scale(tensor, scale)
        how = combination(tensor.dtype, op)
        parts = part_numels(tensor.numel(), self.size, numels)
        call = tensor_call(op, tensor.dtype, tensor.numel(), scale)
        self.check_call(f"reduce_scatter by {call.text} in parts of {parts}")
        total = self._reduce_scatter_flat(flat_of(tensor), parts, how)
        is_wide = total.dtype is not how.storage_dtype
        result = torch.empty_like(total, dtype=how.storage_dtype) if is_wide else total
        finish(total, scale, result)
        return result.view(tensor.dtype)

    # -- tensors of all shapes --------------------------------------------------------------

    @in_step
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the shapes, then the tensors by messages."""
        check_tensor(tensor)
        self.check_call(f"all_gather of {name_of(tensor.dtype)}")
        shapes: list[torch.Size] = self._calls.allgather(tensor.shape)
        numels = [shape.numel() for shape in shapes]
        gathered = allgather_by_messages(self.wire, flat_of(tensor), numels)
        self._watch.confirm()
        return [part.view(shape) for part, shape in zip(gathered, shapes, strict=True)]

    @in_step
    def alltoall(self, tensors: Sequence[Tensor], call: str = "") -> list[Tensor]:
        """Exchange the shapes, then the tensors by messages."""
        for tensor in tensors:
            check_tensor(tensor)
        check_alltoall(tensors, self.size)
        self.check_call(call or f"alltoall of {name_of(tensors[0].dtype)}")
        shapes: list[torch.Size] = self._calls.alltoall([tensor.shape for tensor in tensors])
        given = [flat_of(tensor) for tensor in tensors]
        received = [torch.empty(shape.numel(), dtype=given[0].dtype) for shape in shapes]
        pairwise_alltoall_(self.wire, given, received)
        self._watch.confirm()
        return [part.view(shape) for part, shape in zip(received, shapes, strict=True)]

    @in_step
    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:
        """Broadcast the tensor in chunks."""
        check_tensor(tensor)
        check_rank(root, self.size, "root")
        self.check_call(f"broadcast of {tensor.numel()} {name_of(tensor.dtype)} from rank {root}")
        with flattened(tensor) as values:
            for chunk in values.split(CHUNK_ELEMENTS):
                self._library_bytes += chunk.nbytes
                self._calls.run(self._comm.Ibcast, bytes_of(chunk), root, memory=chunk)
        return FINISHED

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send the bytes of ``tensor``."""
        check_tensor(tensor)
        check_rank(dest, self.size, "dest")
        self._require_open()
        self._watch.require_in_step()
        self.wire.send(flat_of(tensor), dest, _users(tag))

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Receive the bytes of ``tensor``."""
        check_tensor(tensor)
        check_rank(source, self.size, "source")
        self._require_open()
        self._watch.require_in_step()
        with flattened(tensor) as values:
            self.wire.receive_(values, source, _users(tag))
        self._watch.confirm()

    # -- objects ----------------------------------------------------------------------------

    @in_step
    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Broadcast the pickled value."""
        check_rank(root, self.size, "root")
        self.check_call(f"broadcast of an object from rank {root}")
        result: T = self._calls.bcast(value, root)
        return result

    @in_step
    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """Gather pickled values on ``root``."""
        check_rank(root, self.size, "root")
        self.check_call(f"gather of objects on rank {root}")
        result: list[T] | None = self._calls.gather(value, root)
        return result

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001 - reads as a sentence
        """Raise on every rank with the messages of the ranks on which ``ok`` is false."""
        raise_if_refused(self, None if ok else message)

    @in_step
    def allgather_object(self, value: T, call: str = GATHER) -> list[T]:
        """Gather pickled values on all ranks."""
        self.check_call(call)
        result: list[T] = self._calls.allgather(value)
        return result

    # -- the ranks --------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        self.check_call()

    def check_call(self, call: str = "barrier") -> None:
        """Wait until every rank has begun the same ``call``. Collective.

        Raises:
            MismatchError: the calls differ; on every rank.
        """
        self._require_open()
        check_call(self._comm, call_of(call), self._watch)

    def _require_open(self) -> None:
        self._owner.check()
        require_open(self.is_open, "a communicator", CommError)

    @in_step
    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Create a group by splitting the MPI communicator."""
        check_group(ranks, self.size)
        self.check_call(f"group of ranks {list(ranks)}")
        is_member = self.rank in ranks
        color, key = (0, ranks.index(self.rank)) if is_member else (MPI.UNDEFINED, 0)
        members = self._calls.split(color, key)
        return None if members is None else self._make_group(members, ranks, None)

    def group_by_members(
        self, ranks: Sequence[int], *, purpose: str, limit: Limit | None = None
    ) -> Communicator:
        """Create a group; unlike ``group``, collective only over the ranks of the group.

        Args:
            ranks: ranks of this communicator, by rank in the group.
            purpose: text that identifies this creation. While the creation of a group is
                incomplete on a rank, also after an error, another group of the same ranks must
                have a different ``purpose``.
            limit: limit of waits; None for the limit of this communicator.
        """
        check_group(ranks, self.size)
        watch = self._watch.of_group(ranks, limit)
        wire = MpiWire(self._comm, watch=watch, world_ranks=self._world_ranks)
        tag = zlib.crc32(f"{purpose} {ranks}".encode()) % NUM_TAGS
        had_left = self._has_left_messages
        self._has_left_messages = True
        attempt = self._member_sync.wait_for_members(wire, watch, ranks, tag)
        ours = self._comm.Get_group()
        chosen = ours.Incl(list(ranks))
        # The tag depends on the attempt: the call of an earlier attempt may still be in progress.
        create = partial(self._comm.Create_group, chosen, (tag + attempt) % NUM_TAGS)
        members = WatchedCalls(self._comm, watch).block(create)
        self._has_left_messages = had_left
        chosen.Free()
        ours.Free()
        return self._make_group(members, ranks, limit)

    def new_wire(self) -> MpiWire:
        """Create a wire whose messages match no other messages. Collective."""
        self._wires.append(self._calls.duplicate())
        return MpiWire(self._wires[-1], watch=self._watch)

    def new_mailbox(self) -> mailbox.Mailbox:
        """Create a mailbox that sends MPI messages."""
        self.check_call("new mailbox")
        return mailbox.flat(self._comm, self._watch)

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Create a bucket in private memory."""
        self._num_buckets += 1
        return Bucket(torch.zeros(numel, dtype=dtype), number=self._num_buckets)

    def fail(self) -> None:
        """Mark this communicator as failed on all ranks."""
        self._watch.fail()

    def rejoin(self) -> None:
        """Allow calls again after different calls."""
        self._watch.mismatch = None

    def traffic(self) -> Traffic:
        """Return bytes sent by messages or passed to MPI collectives, and seconds waited."""
        sent = self._library_bytes + self.wire.num_bytes_sent
        return Traffic(rail_bytes=sent, waited_s=self._watch.waited_s)

    def before_close(self, function: Callable[[], object]) -> None:
        """Register a function that ``close`` calls before it frees MPI communicators."""
        self._before_close.append(function)

    def close(self) -> None:
        """Free the MPI communicators; a no-op the second time."""
        while self._before_close:
            self._before_close.pop(0)()
        while self._wires:
            self._watch.free(self._wires.pop())
        if self.is_open:
            if not self._has_left_messages:
                self._watch.free(self._comm)
            self._comm = MPI.Intracomm()

    @property
    def watch(self) -> Watch:
        """The watch that performs all waits of this communicator."""
        return self._watch

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has not been called yet."""
        return self._comm != MPI.COMM_NULL

    def _allreduce_wide_(self, total: Tensor, how: Combination) -> None:
        if how.op is Op.SUM and library_sums(total.dtype):
            self._library_bytes += total.nbytes
            arguments = MPI.IN_PLACE, buffer_of(total)
            self._calls.run(self._comm.Iallreduce, *arguments, memory=total)
        else:
            allreduce_by_messages_(self.wire, total, how)
            self._watch.confirm()

    def _reduce_scatter_flat(
        self, values: Tensor, parts: Sequence[int], how: Combination
    ) -> Tensor:
        """Return this rank's reduced part, of dtype ``storage_dtype`` or ``accumulate_dtype``."""
        lanes = values.itemsize // how.storage_dtype.itemsize  # stored numbers per element
        counts = [numel * lanes for numel in parts]
        values = how.view(values)
        fits = library_sums(how.accumulate_dtype) and values.numel() <= CHUNK_ELEMENTS
        if how.op is Op.SUM and fits:
            total = torch.empty(counts[self.rank], dtype=how.accumulate_dtype)
            wide = values.to(how.accumulate_dtype)
            self._library_bytes += wide.nbytes
            arguments = buffer_of(wide), buffer_of(total), counts, MPI.SUM
            self._calls.run(self._comm.Ireduce_scatter, *arguments, memory=(wide, total))
            return total
        total = pairwise_reduce_scatter(self.wire, values.split(counts), how)
        self._watch.confirm()
        return total

    def _make_flat_group(
        self, members: MPI.Intracomm, ranks: Sequence[int], limit: Limit | None
    ) -> Communicator:
        return MpiCommunicator(members, watch=self._watch.of_group(ranks, limit))


def _users(tag: int) -> int:
    """Return the MPI tag of a user message; tag 0 is used by collectives."""
    if not 0 <= tag < NUM_TAGS:
        raise CommError(f"tag must be from 0 to 32766, got {tag}")
    return tag + 1
