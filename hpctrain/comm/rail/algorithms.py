"""Algorithms between nodes: all-reduces by schedules, and pairwise exchanges."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, cycle, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.wire import Arrival, Wire, receives
from hpctrain.core.units import KIB
from hpctrain.cost.schedules import COMBINE, COPY, NOBODY, SCHEDULES, Phase, Round, Schedule

Algorithm = Callable[[Wire, Tensor, Combination], None]
"""Replaces a flat, contiguous tensor of ``storage_dtype`` by its reduction over all ranks."""


def allreduce_by_schedule_(
    name: str, wire: Wire, tensor: Tensor, combination: Combination
) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. ``name`` is one of ``SCHEDULES``, whose functions document the costs.
    """
    for transfer in allreduce_steps(name, wire, tensor, combination):
        wire.finish(transfer)


def allreduce_steps(
    name: str, wire: Wire, tensor: Tensor, combination: Combination, tag: int = 0
) -> Iterator[Any]:
    """All-reduce in steps; yield each transfer that must finish before the next step. Collective.

    The algorithm is that of ``allreduce_by_schedule_``. Several all-reduces may be in flight, each
    with its own ``tag``.
    """
    numel, size = tensor.numel(), wire.size
    if size == 1 or numel == 0:
        return
    parts = _parts_of(SCHEDULES[name], wire.rank, size, numel, tensor.itemsize)
    pieces = tensor.split(parts[0].numels) if parts[0].numels else ()
    for part in parts:
        if pieces:
            yield from _pipeline(part, wire, pieces, combination, tag)
        else:
            yield from _exchange(part, wire, tensor, combination, tag)


class _Part(NamedTuple):
    """Operations of one rank in one phase of a schedule, for a tensor of one size."""

    phase: Phase  # in an exchange a piece is a slice of the tensor, None the whole tensor
    inbox: int  # elements of the largest message that is combined
    numels: list[int]  # elements of each piece; empty for an exchange


@lru_cache(maxsize=1024)
def _parts_of(
    schedule: Schedule, rank: int, size: int, numel: int, itemsize: int
) -> tuple[_Part, ...]:
    num_segments = schedule.num_segments(numel * itemsize, size)
    num_pieces = schedule.num_parts(size) * num_segments
    bounds = schedule.cut(numel, num_pieces)
    numels = [stop - start for start, stop in pairwise(bounds)]

    def part(first: int, num: int) -> slice | None:
        return None if num == num_pieces else slice(bounds[first], bounds[first + num])

    def cut(each: Round) -> Round:
        return each._replace(
            outgoing=part(each.outgoing, each.num_pieces),
            incoming=part(each.incoming, each.num_pieces),
        )

    parts = []
    for phase in _phases_of(schedule, rank, size, num_segments):
        longest = max((each.num_pieces for each in phase.rounds if each.action != COPY), default=0)
        inbox = -(-longest * numel // num_pieces)
        if phase.window:
            parts.append(_Part(phase, inbox, numels))
        else:
            rounds = tuple(cut(each) for each in phase.rounds)
            parts.append(_Part(phase._replace(rounds=rounds), inbox, []))
    return tuple(parts)


@lru_cache(maxsize=128)
def _phases_of(schedule: Schedule, rank: int, size: int, num_segments: int) -> tuple[Phase, ...]:
    """Return the phases of a schedule, without rounds in which this rank is idle."""
    return tuple(
        phase._replace(
            rounds=tuple(r for r in phase.rounds if r.dest != NOBODY or r.source != NOBODY)
        )
        for phase in schedule.phases(rank, size, num_segments)
    )


def _exchange(
    part: _Part, wire: Wire, tensor: Tensor, combination: Combination, tag: int
) -> Iterator[Any]:
    """Execute the rounds one by one: send and receive, then combine."""
    mine, theirs = tensor, tensor.new_empty(part.inbox) if part.inbox else tensor
    for dest, outgoing, source, incoming, _, action in part.phase.rounds:
        arriving = leaving = None
        kept = other = mine
        if source != NOBODY:
            kept = mine if incoming is None else mine[incoming]
            other = kept
            if action != COPY:
                other = theirs if incoming is None else theirs[: kept.numel()]
            arriving = wire.start_receive(other, source, tag)
        if dest != NOBODY:
            leaving = wire.start_send(mine if outgoing is None else mine[outgoing], dest, tag)
        if arriving is not None:
            yield arriving
        if leaving is not None:
            yield leaving
        if other is kept:
            continue
        if action == COMBINE:
            combination.into(kept, other)
        else:
            combination.into(other, kept)
            mine, theirs = theirs, mine
    if mine is not tensor:
        tensor.copy_(mine)


def _pipeline(
    part: _Part, wire: Wire, pieces: Sequence[Tensor], combination: Combination, tag: int
) -> Iterator[Any]:
    """Execute the rounds with several messages in flight, each with one piece."""
    phase = part.phase
    arriving = receives(wire, _arrivals(part, pieces), phase.ahead, tag)
    leaving: deque[object] = deque()
    later = iter(phase.rounds)
    for turn, each in enumerate(phase.rounds):
        for sent in islice(later, 1 if turn else phase.lead):
            if sent.dest != NOBODY:
                leaving.append(wire.start_send(pieces[sent.outgoing], sent.dest, tag))
        # The next receive may overwrite the memory that these sends read.
        while len(leaving) > phase.window:
            yield leaving.popleft()
        if each.source != NOBODY:
            transfer, other = next(arriving)
            yield transfer
            if each.action == COMBINE:
                combination.into(pieces[each.incoming], other)
    yield from leaving


def _arrivals(part: _Part, pieces: Sequence[Tensor]) -> Iterator[Arrival]:
    inboxes = cycle(torch.empty(part.phase.ahead, part.inbox, dtype=pieces[0].dtype))
    for each in part.phase.rounds:
        if each.source != NOBODY:
            kept = pieces[each.incoming]
            into = kept if each.action == COPY else next(inboxes)[: kept.numel()]
            yield Arrival(into, each.source)


DOUBLING_BYTES = 32 * KIB
"""Below this size, log2(N) rounds with whole tensors are faster than 2 log2(N) with parts."""


def allreduce_by_messages_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over all ranks. Collective."""
    allreduce_by_schedule_(schedule_name("library", tensor.nbytes), wire, tensor, combination)


def schedule_name(name: str, num_bytes: int) -> str:
    """Return the schedule of a plan's algorithm; for ``library``, a schedule that replaces it."""
    if name != "library":
        return name
    return "doubling" if num_bytes < DOUBLING_BYTES else "halving"


ALGORITHMS: dict[str, Algorithm] = {
    **{name: partial(allreduce_by_schedule_, name) for name in SCHEDULES},
    "library": allreduce_by_messages_,  # for dtypes that the MPI library cannot sum
}
"""Algorithms by their names in a plan."""


def pairwise_alltoall_(wire: Wire, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
    """Send ``outgoing[r]`` to rank r, and receive ``incoming[r]`` from rank r.

    Collective. Tensors are flat and contiguous; several ``outgoing`` tensors may be the same.
    Empty tensors are not sent.
    """
    incoming[wire.rank].copy_(outgoing[wire.rank])
    for step in range(1, wire.size):
        dest, source = (wire.rank + step) % wire.size, (wire.rank - step) % wire.size
        transfers = []
        if incoming[source].numel():
            transfers.append(wire.start_receive(incoming[source], source))
        if outgoing[dest].numel():
            transfers.append(wire.start_send(outgoing[dest], dest))
        for transfer in transfers:
            wire.finish(transfer)


RING_BYTES = 64 * KIB
"""From this mean size, tensors are gathered without packing, since latency matters little."""


def allgather_by_messages(wire: Wire, mine: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """Return the flat, contiguous tensors of all ranks, by rank, as new tensors. Collective.

    ``numels`` has the number of elements of each tensor. For small tensors, each rank sends
    log2(N) messages of several tensors; large tensors are passed around a ring.

    Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
    message-passing systems".
    """
    rank, size = wire.rank, wire.size
    if sum(numels) * mine.itemsize >= RING_BYTES * size:
        gathered = [mine.new_empty(numel) for numel in numels]
        gathered[rank].copy_(mine)
        for step in range(size - 1):
            outgoing, incoming = gathered[rank - step], gathered[rank - step - 1]
            wire.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
        return gathered
    order = [*range(rank, size), *range(rank)]
    bounds = [*accumulate((numels[r] for r in order), initial=0)]
    packed, held = mine.new_empty(bounds[-1]), 1
    packed[: mine.numel()] = mine
    while held < size:
        num = min(held, size - held)
        incoming = packed[bounds[held] : bounds[held + num]]
        wire.exchange(packed[: bounds[num]], order[-held], incoming, order[held])
        held += num
    parts = [packed[start:stop].clone() for start, stop in pairwise(bounds)]
    return parts[size - rank :] + parts[: size - rank]


def pairwise_reduce_scatter(
    wire: Wire, parts: Sequence[Tensor], combination: Combination
) -> Tensor:
    """Reduce each part over all ranks; return the reduced part of this rank. Collective.

    Parts are flat and contiguous, of dtype ``combination.storage_dtype``, with equal sizes on all
    ranks.

    Returns:
        A new tensor of dtype ``combination.accumulate_dtype``, as long as this rank's part.
    """
    total = parts[wire.rank].to(combination.accumulate_dtype, copy=True)
    inbox = torch.empty_like(parts[wire.rank])
    for step in range(1, wire.size):
        dest, source = (wire.rank + step) % wire.size, (wire.rank - step) % wire.size
        wire.exchange(parts[dest], dest, inbox, source)
        combination.into(total, inbox)
    return total
