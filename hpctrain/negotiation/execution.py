"""Carries out what the ranks have decided: small reductions together, all else one by one."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.core.errors import RankLostError
from hpctrain.core.units import MIB
from hpctrain.negotiation import exchanging
from hpctrain.negotiation.exchanging import copy_of, empty_like
from hpctrain.negotiation.fusing import DIRECT_BYTES
from hpctrain.negotiation.fusion_buffer import FusionBuffer
from hpctrain.negotiation.handle import succeed_all, succeed_in_place, tensors_of
from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.reducing import Recipe, add_, multiply_, recipe, reduce_
from hpctrain.negotiation.request import Kind, Request, Result

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.negotiation.handle import Handle
    from hpctrain.negotiation.operation_batch import Entry
    from hpctrain.negotiation.timeline.timeline import Timeline

from typing import TYPE_CHECKING

from hpctrain.negotiation.request import Signature

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Traffic
    from hpctrain.negotiation.handle import Handle
    from hpctrain.negotiation.timeline.timeline import Timeline
from collections import OrderedDict
from operator import itemgetter
from typing import Any, NamedTuple

from hpctrain.negotiation.fusing import runs
from hpctrain.negotiation.handle import Handle
from hpctrain.negotiation.operation_batch import Entry

_MOST_CUTS = 16


class Message(NamedTuple):
    """Requests that are carried out together."""

    pick: Callable[[Any], Sequence[Handle]]
    """Takes theirs out of the handles of the batch."""
    key: object
    """Equal for equal messages; None where they are not single tensors that share a buffer."""
    is_flat: bool
    """Whether all tensors have one dimension."""


class Cuts:
    """Cuts batches; those that are given by the same entries only once."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, tuple[Sequence[Entry], list[Message]]] = OrderedDict()
        self._num_cuts = 0

    def of(
        self, handles: Sequence[Handle], fusion_bytes: int, entries: Sequence[Entry] | None
    ) -> list[Message]:
        """Return the messages of a batch.

        Args:
            handles: of this rank.
            fusion_bytes: largest message of several requests.
            entries: what was decided of each, where that is worth remembering.
        """
        if entries is None:
            return self._cut(handles, fusion_bytes)
        key = fusion_bytes, id(entries)
        found = self._known.get(key)
        if found is None:
            # The entries are kept, so that their id stays theirs.
            found = self._known[key] = entries, self._cut(handles, fusion_bytes)
            if len(self._known) > _MOST_CUTS:
                self._known.popitem(last=False)
        return found[1]

    def _cut(self, handles: Sequence[Handle], fusion_bytes: int) -> list[Message]:
        self._num_cuts += 1
        requests = [handle.request for handle in handles]
        return [
            _message(numbers, [requests[number] for number in numbers], (self._num_cuts, place))
            for place, numbers in enumerate(runs(requests, fusion_bytes))
        ]


def _message(numbers: list[int], together: Sequence[Request], key: object) -> Message:
    if len(numbers) == 1 or any(len(each.tensors) != 1 for each in together):
        return Message(
            pick=lambda handles: [handles[number] for number in numbers], key=None, is_flat=False
        )
    is_flat = all(len(each.signature.shapes[0]) == 1 for each in together)
    return Message(itemgetter(*numbers), key, is_flat)


class Phases:
    """The operations that are carried out together, from their start to their end."""

    def __init__(
        self,
        timeline: "Timeline",
        handles: Sequence["Handle"],
        traffic: "Callable[[], Traffic]",
    ) -> None:
        self._timeline = timeline
        self._traffic = traffic
        self._names = [handle.name for handle in handles]
        self._before: Traffic | None = None
        for handle in handles:
            request = handle.request
            num_bytes = sum(tensor.nbytes for tensor in request.tensors)
            timeline.start(handle.name, request.kind.name, num_bytes)
        timeline.flush()  # it may be the last that this process does

    def enter(self, phase: str) -> None:
        """Leave the phase before, if there was one, for this one."""
        self._leave()
        for name in self._names:
            self._timeline.phase_start(name, phase)
        self._before = self._traffic()

    def end(self) -> None:
        """Say that it is over."""
        self._leave()
        for name in self._names:
            self._timeline.end(name)
        self._timeline.flush()  # before anybody hears of the result

    def _leave(self) -> None:
        if self._before is not None:
            moved = self._traffic().since(self._before)
            for name in self._names:
                self._timeline.phase_end(name, moved)
        self._before = None


__all__ = ["Executor", "stand_in"]

_ALONE: dict[Kind, tuple[Callable[["Communicator", Request], Result], str]] = {
    Kind.ALLGATHER: (exchanging.allgather, "MPI_ALLGATHER"),
    Kind.ALLTOALL: (exchanging.alltoall, "MPI_ALLTOALL"),
    Kind.BROADCAST: (exchanging.broadcast, "MPI_BCAST"),
    Kind.REDUCESCATTER: (exchanging.reducescatter, "MPI_REDUCESCATTER"),
    Kind.BARRIER: (exchanging.barrier, "BARRIER"),
}
"""What carries out an operation that shares no message, and what a timeline calls it."""


class Executor:
    """Carries out batches that are the same on all ranks; used by one thread at a time."""

    def __init__(self, comm: "Communicator", *, fusion_bytes: int = 64 * MIB) -> None:
        """Take a communicator of the ranks of the set.

        Args:
            comm: what the operations use.
            fusion_bytes: largest message of fused reductions, the same on all ranks; 0 to fuse
                nothing. It may be changed between batches.
        """
        self.fusion_bytes = fusion_bytes
        self._comm = comm
        self._buffer = FusionBuffer(comm)
        self._cuts = Cuts()

    def carry_out(
        self,
        handles: Sequence["Handle"],
        timeline: "Timeline | None" = None,
        entries: Sequence["Entry"] | None = None,
    ) -> None:
        """Carry out the requests of ``handles`` and give each its result, or its error.

        Collective: the requests of all ranks have the same signatures, in the same order. An
        operation that fails takes those along with which it shared a message; the others go on,
        except after the loss of a rank.

        Args:
            handles: of this rank; of what it contributes as ``stand_in`` too.
            timeline: hears of all phases.
            entries: what was decided of each, where the batch may come again.
        """
        if len(handles) == 1:
            self._attempt(handles, timeline)
            return
        lost: RankLostError | None = None
        for message in self._cuts.of(handles, self.fusion_bytes, entries):
            together = message.pick(handles)
            if lost is None:
                lost = self._attempt(together, timeline, message)
            else:
                for handle in together:
                    handle.fail(lost)

    def _attempt(
        self,
        handles: Sequence["Handle"],
        timeline: "Timeline | None",
        message: Message | None = None,
    ) -> RankLostError | None:
        phases = None if timeline is None else Phases(timeline, handles, self._comm.traffic)
        try:
            if phases is None and message is not None and message.key is not None:
                self._shared(handles, message)
                return None
            request = handles[0].request
            if request.kind is Kind.ALLREDUCE:
                results = self._allreduce([handle.request for handle in handles], phases)
            else:
                function, phase = _ALONE[request.kind]
                if phases is not None:
                    phases.enter(phase)
                with torch.no_grad():
                    results = [function(self._comm, request)]
        except Exception as error:  # for those who wait
            for handle in handles:
                handle.fail(error)
            return error if isinstance(error, RankLostError) else None
        finally:
            if phases is not None:
                phases.end()
        for handle, result in zip(handles, results, strict=True):
            handle.succeed(result)
        return None

    # -- reductions -------------------------------------------------------------------------

    def _allreduce(self, requests: Sequence[Request], phases: Phases | None) -> list[Result]:
        """Reduce requests of one operation and factors; of several dtypes only if it is one."""
        _, dtypes, _, op, _, _, _, _ = requests[0].signature
        if len(requests) == 1 and len(dtypes) == 1 and op is not ReduceOp.ADASUM:
            if phases is not None:
                phases.enter("MPI_ALLREDUCE")
            how = self._recipe(requests[0], dtypes[0])
            tensor = requests[0].tensors[0]
            result = tensor if requests[0].in_place else copy_of(tensor.detach())
            reduce_(self._comm, result, how)
            return [[result]]
        with torch.no_grad():
            results = [_results_of(request) for request in requests]
            given = [tensor for request in requests for tensor in request.tensors]
            taken = [tensor for result in results for tensor in result]
            if len(set(dtypes)) == 1:
                self._together(given, taken, requests[0], phases)
                return results
            for dtype in dict.fromkeys(dtypes):
                chosen = [number for number, tensor in enumerate(given) if tensor.dtype is dtype]
                self._together(
                    [given[number] for number in chosen],
                    [taken[number] for number in chosen],
                    requests[0],
                    phases,
                )
        return results

    def _together(
        self,
        given: list[Tensor],
        taken: list[Tensor],
        request: Request,
        phases: Phases | None,
    ) -> None:
        """Reduce ``given``, of one dtype, into ``taken``, as ``request`` wants it."""
        how = self._recipe(request, given[0].dtype)
        if request.signature.op is ReduceOp.ADASUM:
            self._adasum(given, taken, how, phases)
            return
        small: list[int] = []
        for number, tensor in enumerate(given):
            if tensor.nbytes < DIRECT_BYTES:
                small.append(number)
                continue
            if phases is not None:
                phases.enter("MPI_ALLREDUCE")
            if taken[number] is not tensor:
                taken[number].copy_(tensor)
            reduce_(self._comm, taken[number], how)
        for some in _portions(small, given, self.fusion_bytes):
            self._fused(
                [given[number] for number in some], [taken[number] for number in some], how, phases
            )

    def _shared(self, handles: Sequence["Handle"], message: Message) -> None:
        """Reduce single small tensors of one dtype: what there may be thousands of."""
        with torch.no_grad():
            tensors = tensors_of(handles)
            if tensors is not None:
                how = self._recipe(handles[0].request, tensors[0].dtype)
                self._fused(tensors, tensors, how, None, message)
                succeed_in_place(handles)
                return
            requests = [handle.request for handle in handles]
            given = [request.tensors[0] for request in requests]
            taken = [_results_of(request)[0] for request in requests]
            self._fused(given, taken, self._recipe(requests[0], given[0].dtype), None, message)
            succeed_all(handles, taken)

    def _fused(
        self,
        given: list[Tensor],
        taken: list[Tensor],
        how: Recipe,
        phases: Phases | None,
        message: Message | None = None,
    ) -> None:
        """Reduce ``given`` as one into ``taken``; all of ``message``, if that is given."""
        layout = self._buffer.layout(given, message and message.key)
        if phases is not None:
            phases.enter("MEMCPY_IN_FUSION_BUFFER")
        if message is not None and message.is_flat:
            torch.cat(given, out=layout.flat)  # in half the time
        else:
            torch._foreach_copy_(layout.views, given)
        if phases is not None:
            phases.enter("MPI_ALLREDUCE")
        others = layout.others if how.is_addition else None
        if others is not None:
            self._comm.barrier()  # from here on all is there, and stays until the next but one
        else:
            reduce_(self._comm, layout.whole, how)
        if phases is not None:
            phases.enter("MEMCPY_OUT_FUSION_BUFFER")
        if others is not None:
            add_(given, taken, others, how)
            self._buffer.count(layout)
        else:
            torch._foreach_copy_(taken, layout.views)

    def _recipe(self, request: Request, dtype: torch.dtype) -> Recipe:
        _, _, _, op, prescale, postscale, _, _ = request.signature
        assert op is not None
        return recipe(dtype, op, prescale, postscale, self._comm.size)

    def _adasum(
        self, given: list[Tensor], taken: list[Tensor], how: Recipe, phases: Phases | None
    ) -> None:
        from hpctrain.comm.adasum import adasum_  # noqa: PLC0415 - a world of one needs no MPI

        if phases is not None:
            phases.enter("MPI_ADASUM_ALLREDUCE")
        for source, target in zip(given, taken, strict=True):
            if target is not source:
                target.copy_(source)
            multiply_(target, how.before)
        adasum_(self._comm, taken)
        for target in taken:
            multiply_(target, how.scale)


def _results_of(request: Request) -> Result:
    """Return the tensors in which the results will be."""
    if request.in_place:
        return list(request.tensors)
    return [empty_like(tensor) for tensor in request.tensors]


def _portions(
    numbers: Sequence[int], tensors: Sequence[Tensor], most_bytes: int
) -> list[list[int]]:
    """Cut ``numbers`` into runs whose tensors have at most ``most_bytes``, or are a single one."""
    portions: list[list[int]] = []
    filled = 0
    for number in numbers:
        num_bytes = tensors[number].nbytes
        if not portions or filled + num_bytes > most_bytes:
            portions.append([])
            filled = 0
        portions[-1].append(number)
        filled += num_bytes
    return portions


def stand_in(signature: Signature, rank: int, size: int) -> Request:  # noqa: ARG001 - interface
    """Return a request that changes nothing for the other ranks.

    Args:
        signature: of the operation; not of a broadcast from this rank, which nobody can replace.
        rank: of this process in the set.
        size: number of ranks of the set.

    Returns:
        To reductions neutral elements; to gathers and exchanges no rows; room for a broadcast.
        Its signature is the one given.
    """
    kind, dtypes, shapes, op, prescale, postscale, root, _ = signature
    tensors = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        if signature.is_free:
            tensors.append(torch.empty((0, *shape), dtype=dtype, device="cpu"))
        elif op is None:
            tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
        else:
            tensors.append(_neutral(shape, dtype, op, prescale))
    return Request(
        kind,
        None,
        tensors,
        in_place=True,
        op=op,
        prescale=prescale,
        postscale=postscale,
        root=root,
        splits=[0] * size if kind is Kind.ALLTOALL else None,
    )


def _neutral(shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp, prescale: float) -> Tensor:
    """Return elements that are neutral once they are multiplied by ``prescale``."""
    value: float = 0
    if op is ReduceOp.PRODUCT:
        value = 1 / (prescale or 1)
    elif op in (ReduceOp.MIN, ReduceOp.MAX):
        value = _range(dtype)[(op is ReduceOp.MIN) == (prescale >= 0)]
    if dtype.is_floating_point or dtype.is_complex:
        element = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    else:
        element = torch.tensor(round(value), dtype=dtype, device="cpu")
    return element.expand(shape).clone(memory_format=torch.contiguous_format)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype is torch.bool:
        return 0, 1
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min, torch.iinfo(dtype).max
    infinity = torch.tensor(torch.inf, device="cpu")
    if infinity.to(dtype).to(torch.float32).isinf():  # not all of those with 8 bits
        return -torch.inf, torch.inf
    return torch.finfo(dtype).min, torch.finfo(dtype).max
