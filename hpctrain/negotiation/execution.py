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
from hpctrain.negotiation.join_placeholder import stand_in
from hpctrain.negotiation.phases import Phases
from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.reducing import Recipe, add_, multiply_, recipe, reduce_
from hpctrain.negotiation.request import Kind, Request, Result
from hpctrain.negotiation.splitting import Cuts, Message

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.negotiation.batch import Entry
    from hpctrain.negotiation.handle import Handle
    from hpctrain.negotiation.timeline.timeline import Timeline

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
