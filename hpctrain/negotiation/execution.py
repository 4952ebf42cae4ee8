"""Execution of operations that all ranks have submitted; small reductions share a message."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from hpctrain.comm.agreement import agreed
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.tensor_bucket import TensorBucket
from hpctrain.core.errors import CommError, NodeMemoryError, RankLostError
from hpctrain.core.units import KIB, MIB
from hpctrain.negotiation.reducing import Recipe, multiply_, recipe_of, reduce_, reduce_scatter
from hpctrain.negotiation.request import Kind, ReduceOp, Request, Result

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.operation_result import Traffic
    from hpctrain.negotiation.messages import OperationBatch
    from hpctrain.negotiation.request import Handle, TensorHandle
    from hpctrain.negotiation.timeline import Timeline

DIRECT_BYTES = 1 << 20
"""Minimum size of tensors that are not fused: a copy would cost more than a separate message."""
BUCKET_BYTES = 128 * KIB
"""Minimum size of messages that are reduced inside their bucket.

This saves a copy, but takes two more synchronizations.
"""
_MAX_VIEWS = 1 << 14  # cached views; creating one costs as much as copying some KiB


def runs(requests: Sequence[Request], fusion_bytes: int) -> list[list[int]]:
    """Divide requests into groups that are executed together; return the indices of each group.

    The result depends on the signatures only, so it is the same on all ranks. All-reduces of the
    same dtype, operation and factors are fused up to ``fusion_bytes``, at the position of the
    first of these requests. All other requests, and requests of several dtypes, are executed
    alone. A request is never split.
    """
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number, request in enumerate(requests):
        num_bytes = fusible_bytes(request)
        if num_bytes is None:
            found.append([number])
            continue
        signature = request.signature
        key = (signature.dtypes[0], signature.op, signature.prescale, signature.postscale)
        run, filled = filling.get(key, ((), 0))
        if isinstance(run, list) and filled + num_bytes <= fusion_bytes:
            run.append(number)
        else:
            run, filled = [number], 0
            found.append(run)
        filling[key] = run, filled + num_bytes
    return found


def fusible_bytes(request: Request) -> int | None:
    """Return the bytes that a request adds to a fused message; None if it cannot be fused."""
    signature = request.signature
    if signature.kind is not Kind.ALLREDUCE or signature.op is ReduceOp.ADASUM:
        return None
    tensors = request.tensors
    if len(tensors) == 1:
        num_bytes = tensors[0].nbytes
        return num_bytes if num_bytes < DIRECT_BYTES else None
    if len(set(signature.dtypes)) != 1:
        return None
    return sum([tensor.nbytes for tensor in tensors if tensor.nbytes < DIRECT_BYTES])


class FusionBuffer:
    """Provides buckets for fused messages, all in the same memory.

    The memory is allocated at the first use.

    Args:
        comm: communicator that reduces the buckets.
    """

    def __init__(self, comm: "Communicator") -> None:
        self._comm = comm
        self._memory: Bucket | None = None
        self._buckets: OrderedDict[Hashable, TensorBucket] = OrderedDict()
        self._num_views = 0

    def bucket_for(self, tensors: Sequence[Tensor], shapes: Hashable) -> TensorBucket:
        """Return a bucket for ``tensors`` of one dtype; valid until the next call.

        Collective: if the buffer is too small, all ranks allocate a larger one.

        Args:
            tensors: tensors of one dtype.
            shapes: hashable value that identifies the shapes of ``tensors``, for the cache.

        Raises:
            NodeMemoryError: a node does not have enough memory; raised on every rank.
        """
        dtype = tensors[0].dtype
        key = (dtype, shapes)
        found = self._buckets.get(key)
        if found is None:
            # Tensors that are created in inference mode cannot be written outside of it.
            with torch.inference_mode(mode=False):
                found = self._lay_out(dtype, tensors)
            self._keep(key, found)
        else:
            self._buckets.move_to_end(key)
        return found

    def _lay_out(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> TensorBucket:
        numel = sum([tensor.numel() for tensor in tensors])
        memory = self._enough(numel * dtype.itemsize).part(numel, dtype)
        bucket = TensorBucket(memory, tensors)
        if memory.flat.nbytes < BUCKET_BYTES:
            bucket.message = memory.flat
        return bucket

    def _enough(self, num_bytes: int) -> Bucket:
        """Return the memory of the buffer, enlarged to ``num_bytes`` bytes if necessary."""
        if self._memory is None or self._memory.numel < num_bytes:
            self._buckets.clear()  # they are views of the memory that is freed
            self._num_views = 0
            self._memory = None
            size = MIB
            while size < num_bytes:
                size *= 2
            with agreed(self._comm, NodeMemoryError):  # allocation may fail on one node
                self._memory = self._comm.new_bucket(size, torch.uint8)
        assert self._memory is not None
        return self._memory

    def _keep(self, key: Hashable, bucket: TensorBucket) -> None:
        self._buckets[key] = bucket
        self._num_views += len(bucket.parts)
        while self._num_views > _MAX_VIEWS and len(self._buckets) > 1:
            _, oldest = self._buckets.popitem(last=False)
            self._num_views -= len(oldest.parts)


class Phases:
    """Records in a timeline the phases of operations that are executed together.

    Args:
        comm: communicator whose traffic is recorded.
        timeline: timeline to record in; None for no records.
        handles: the operations.
    """

    def __init__(
        self, comm: "Communicator", timeline: "Timeline | None", handles: Sequence["Handle"]
    ) -> None:
        self._comm, self._timeline, self._handles = comm, timeline, handles
        self._before: Traffic | None = None
        if timeline is None:
            return
        for handle in handles:
            request = handle.request
            num_bytes = sum(tensor.nbytes for tensor in request.tensors)
            timeline.begin(handle.name, request.kind.name, num_bytes)
        timeline.flush()  # the process may die in the operation

    def enter(self, phase: str) -> None:
        """End the previous phase, if any, and begin ``phase``."""
        if self._timeline is not None:
            self._leave(self._timeline)
            for handle in self._handles:
                self._timeline.begin(handle.name, phase)
            self._before = self._comm.traffic()

    def end(self) -> None:
        """Record the end of the operations."""
        if self._timeline is not None:
            self._leave(self._timeline)
            for handle in self._handles:
                self._timeline.end(handle.name)
            self._timeline.flush()  # before a caller gets the result

    def _leave(self, timeline: "Timeline") -> None:
        if self._before is not None:
            moved = self._comm.traffic().since(self._before)
            for handle in self._handles:
                timeline.end(handle.name, moved)
        self._before = None


class Executor:
    """Executes batches of operations; a batch is the same on all ranks. Not thread-safe.

    Args:
        comm: communicator of the operations.
        fusion_bytes: maximum size of a fused message, the same on all ranks; 0 disables fusion.
    """

    def __init__(self, comm: "Communicator", *, fusion_bytes: int = 64 * MIB) -> None:
        self._fusion_bytes = fusion_bytes
        self._comm = comm
        self._buffer = FusionBuffer(comm)
        self._silent = Phases(comm, None, ())

    def carry_out(
        self,
        handles: Sequence["Handle"],
        timeline: "Timeline | None" = None,
        batch: "OperationBatch | None" = None,
    ) -> None:
        """Execute the requests of ``handles`` and store each result, or error, in its handle.

        Collective: the requests of all ranks have the same signatures, in the same order. If an
        operation fails, all operations of the same message fail; later operations are executed,
        unless a rank was lost.

        Args:
            handles: the operations.
            timeline: timeline to record, or None.
            batch: batch of the operations; stores which operations share a message, for later
                calls.
        """
        found = batch.runs if batch is not None else None
        if found is None:
            found = runs([handle.request for handle in handles], self._fusion_bytes)
            if batch is not None:
                batch.runs = found
        lost: RankLostError | None = None
        for run in found:
            together = [handles[number] for number in run]
            if lost is None:
                lost = self._attempt(together, timeline)
            else:
                for handle in together:
                    handle.fail(lost)

    def _attempt(
        self, handles: Sequence["Handle"], timeline: "Timeline | None"
    ) -> RankLostError | None:
        phases = self._silent
        if timeline is not None:
            phases = Phases(self._comm, timeline, handles)
        request = handles[0].request
        try:
            with torch.no_grad():
                if len(handles) > 1 and all(handle.repeated for handle in handles):
                    self._repeated(cast("list[TensorHandle]", handles), phases)
                    return None
                if request.kind is Kind.ALLREDUCE:
                    results = self._allreduce([handle.request for handle in handles], phases)
                else:
                    function, phase = _ALONE[request.kind]
                    phases.enter(phase)
                    results = [function(self._comm, request)]
        except Exception as error:  # ``wait`` raises the error
            if not isinstance(error, CommError):  # the other ranks may have executed the operation
                self._comm.fail()
            for handle in handles:
                handle.fail(error)
            return error if isinstance(error, RankLostError) else None
        finally:
            phases.end()
        for handle, result in zip(handles, results, strict=True):
            handle.succeed(result)
        return None

    # -- reductions -------------------------------------------------------------------------

    def _repeated(self, handles: "list[TensorHandle]", phases: Phases) -> None:
        """Reduce the tensors of repeated operations in place, in one message; see ``runs``."""
        tensors = [handle.tensor for handle in handles]
        how = recipe_of(handles[0].signature, self._comm.size)
        shapes = tuple([handle.repeated.signature.shapes for handle in handles])
        self._fused(tensors, tensors, how, phases, shapes)
        for handle in handles:
            handle.is_done = True

    def _allreduce(self, requests: Sequence[Request], phases: Phases) -> list[Result]:
        """Reduce requests with the same operation and factors.

        Several requests must have the same dtype. A single request may have several dtypes.
        """
        results: list[Result] = [
            each.tensors if each.in_place else [_empty(tensor) for tensor in each.tensors]
            for each in requests
        ]
        given = [tensor for request in requests for tensor in request.tensors]
        taken = [tensor for result in results for tensor in result]
        dtypes = requests[0].signature.dtypes
        for dtype in dict.fromkeys(dtypes):
            ours, theirs = given, taken
            if len(set(dtypes)) > 1:
                chosen = [number for number, tensor in enumerate(given) if tensor.dtype is dtype]
                ours = [given[number] for number in chosen]
                theirs = [taken[number] for number in chosen]
            self._together(ours, theirs, requests[0], phases)
        return results

    def _together(
        self, given: list[Tensor], taken: list[Tensor], request: Request, phases: Phases
    ) -> None:
        """Reduce the tensors ``given`` of one dtype as ``request`` specifies, into ``taken``."""
        how = recipe_of(request.signature, self._comm.size, given[0].dtype)
        if request.signature.op is ReduceOp.ADASUM:
            self._adasum(given, taken, how, phases)
            return
        for some in _portions(given, self._fusion_bytes):
            if len(some) > 1:
                chosen = [given[number] for number in some]
                shapes = tuple([tensor.shape for tensor in chosen])
                self._fused(chosen, [taken[number] for number in some], how, phases, shapes)
                continue
            phases.enter("MPI_ALLREDUCE")
            (number,) = some
            if taken[number] is not given[number]:
                taken[number].copy_(given[number])
            reduce_(self._comm, taken[number], how)

    def _fused(
        self,
        given: list[Tensor],
        taken: list[Tensor],
        how: Recipe,
        phases: Phases,
        shapes: Hashable,
    ) -> None:
        """Reduce ``given`` in one message and store the results in ``taken``."""
        bucket = self._buffer.bucket_for(given, shapes)
        phases.enter("MEMCPY_IN_FUSION_BUFFER")
        bucket.pack(given)
        phases.enter("MPI_ALLREDUCE")
        bucket.send(partial(reduce_, self._comm, how=how))
        phases.enter("MEMCPY_OUT_FUSION_BUFFER")
        bucket.unpack(taken)

    def _adasum(
        self, given: list[Tensor], taken: list[Tensor], how: Recipe, phases: Phases
    ) -> None:
        from hpctrain.comm.adasum import adasum_  # noqa: PLC0415 - a world of one needs no MPI

        phases.enter("MPI_ADASUM_ALLREDUCE")
        for source, target in zip(given, taken, strict=True):
            if target is not source:
                target.copy_(source)
            multiply_(target, how.before)
        adasum_(self._comm, taken)
        for target in taken:
            multiply_(target, how.scale)


def _empty(tensor: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor of the same shape and dtype."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _portions(tensors: Sequence[Tensor], max_bytes: int) -> list[list[int]]:
    """Divide tensors into groups of at most ``max_bytes``; return the indices of each group.

    A large tensor is a group of one.
    """
    portions: list[list[int]] = []
    filling: list[int] | None = None
    filled = 0
    for number, tensor in enumerate(tensors):
        num_bytes = tensor.nbytes
        if num_bytes >= DIRECT_BYTES:
            portions.append([number])
        elif filling is None or filled + num_bytes > max_bytes:
            filling, filled = [number], num_bytes
            portions.append(filling)
        else:
            filling.append(number)
            filled += num_bytes
    return portions


def _allgather(comm: "Communicator", request: Request) -> Result:
    """Return the rows of all ranks, in the order of the ranks."""
    return [_joined(comm.all_gather(tensor.detach())) for tensor in request.tensors]


def _alltoall(comm: "Communicator", request: Request) -> Result:
    """Return the rows received from all ranks, and the number of rows from each rank."""
    rows = request.tensors[0].detach()
    splits = request.splits
    if splits is None:
        splits = [len(rows) // comm.size] * comm.size
    parts = comm.alltoall(rows[: sum(splits)].split(list(splits)))
    received = torch.tensor([len(part) for part in parts], dtype=torch.int32, device="cpu")
    return [_joined(parts), received]


def _broadcast(comm: "Communicator", request: Request) -> Result:
    """Return the tensors of the root rank."""
    root = request.signature.root
    assert root is not None
    results = []
    for tensor in request.tensors:
        result = tensor
        if not request.in_place:
            result = _empty(tensor)
            if comm.rank == root:
                result.copy_(tensor)
        comm.broadcast_(result, root).wait()
        results.append(result)
    return results


def _reducescatter(comm: "Communicator", request: Request) -> Result:
    """Return this rank's rows of the reduced tensors; the first ranks get the remainder."""
    results = []
    for tensor in request.tensors:
        how = recipe_of(request.signature, comm.size, tensor.dtype)
        rows = [len(tensor) // comm.size + (r < len(tensor) % comm.size) for r in range(comm.size)]
        row_numel = math.prod(tensor.shape[1:])
        part = reduce_scatter(comm, tensor, [num_rows * row_numel for num_rows in rows], how)
        results.append(part.view(rows[comm.rank], *tensor.shape[1:]))
    return results


def _barrier(comm: "Communicator", _: Request) -> Result:
    """Wait for all ranks; return no tensors."""
    comm.barrier()
    return []


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


_ALONE: dict[Kind, tuple[Callable[["Communicator", Request], Result], str]] = {
    Kind.ALLGATHER: (_allgather, "MPI_ALLGATHER"),
    Kind.ALLTOALL: (_alltoall, "MPI_ALLTOALL"),
    Kind.BROADCAST: (_broadcast, "MPI_BCAST"),
    Kind.REDUCESCATTER: (_reducescatter, "MPI_REDUCESCATTER"),
    Kind.BARRIER: (_barrier, "BARRIER"),
}
"""Function of each kind of operation that is not fused, and its title in a timeline."""
