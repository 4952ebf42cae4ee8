"""Trees: one binomial tree of few messages, and two binary ones at full bandwidth."""

from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.wire import Arrival, Wire, cut, num_segments, received
from hpctrain.core.units import KIB


def tree_allreduce_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. A rank's children are 1, 2, 4, ... further on, up to its own lowest set bit; their
    subtrees are combined in that order. 2 ceil(log2 N) rounds of the whole message, so about
    2 log2(N) (a + m b) for a message of m bytes, a seconds of latency and b seconds per byte.
    Slower than doubling on a quiet network, but it sends only 2(N-1) messages in all.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", binomial tree in the sections on broadcast and reduce.
    """
    rank, size = wire.rank, wire.size
    if size == 1 or tensor.numel() == 0:
        return
    reach = rank & -rank if rank else size  # of the subtree: ranks below rank + reach
    children = [rank + (1 << k) for k in range(size.bit_length()) if 1 << k < reach]
    children = [child for child in children if child < size]
    if children:
        inbox = torch.empty_like(tensor)
        for child in children:
            wire.receive_(inbox, child)
            combination.into(tensor, inbox)
    if rank:
        wire.send(tensor, rank - reach)
        wire.receive_(tensor, rank - reach)
    for child in reversed(children):
        wire.send(tensor, child)


SEGMENT_BYTES = 256 * KIB
"""Small enough to fill the tree quickly, large enough to hide the latency of a message."""


class TreePlace(NamedTuple):
    """Where a rank stands in a tree."""

    parent: int | None  # None at the root
    children: tuple[int, ...]  # two at most, in the order in which they are combined


def double_tree_allreduce_(wire: Wire, tensor: Tensor, combination: Combination) -> None:
    """Replace a flat, contiguous ``tensor`` by its reduction over the ranks of ``wire``.

    Collective. Each half of the message goes up one of two binary trees, combined on the way,
    and down again, in segments that follow each other. No rank has children in both trees, so
    each sends and receives the message twice at most: about 4 log2(N) (a + s b) + 2 m b for a
    message of m bytes, segments of s bytes, a seconds of latency and b seconds per byte.

    Source: Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", reduction and broadcast; NCCL's double trees are alike.
    Differs: messages are not coloured by rounds, since links work both ways and MPI keeps the
    order; all ranks belong to both trees, each of which has a root of its own.
    """
    if wire.size == 1 or tensor.numel() == 0:
        return
    num_each = num_segments(tensor.numel() * tensor.itemsize // 2, SEGMENT_BYTES)
    pieces = cut(tensor, 2 * num_each)
    places = two_trees(wire.size)[wire.rank]
    # A segment of each half in turn; the tag tells the trees apart.
    schedule = [
        (pieces[tree * num_each + turn], places[tree], tree)
        for turn in range(num_each)
        for tree in range(2)
    ]
    _reduce(wire, schedule, combination)
    _broadcast(wire, schedule)


_Schedule = list[tuple[Tensor, TreePlace, int]]
"""Segment, place of this rank in the tree which it travels, tag."""


def _reduce(wire: Wire, schedule: _Schedule, combination: Combination) -> None:
    longest = max(segment.numel() for segment, _, _ in schedule)
    num_children = max(len(place.children) for _, place, _ in schedule)
    ahead = num_children * min(2, len(schedule) // 2)
    inboxes = torch.empty(ahead, longest, dtype=schedule[0][0].dtype)

    def expected() -> Iterator[Arrival]:
        inbox = cycle(inboxes)
        for segment, place, tag in schedule:
            for child in place.children:
                yield Arrival(next(inbox)[: segment.numel()], child, tag)

    arriving = received(wire, expected(), ahead)
    leaving = []
    for segment, place, tag in schedule:
        for _ in place.children:
            combination.into(segment, next(arriving))
        if place.parent is not None:
            leaving.append(wire.start_send(segment, place.parent, tag))
    for transfer in leaving:
        wire.finish(transfer)


def _broadcast(wire: Wire, schedule: _Schedule) -> None:
    expected = (
        Arrival(segment, place.parent, tag)
        for segment, place, tag in schedule
        if place.parent is not None
    )
    arriving = received(wire, expected, ahead=4)
    leaving = []
    for segment, place, tag in schedule:
        if place.parent is not None:
            next(arriving)
        leaving += [wire.start_send(segment, child, tag) for child in place.children]
    for transfer in leaving:
        wire.finish(transfer)


@cache
def two_trees(size: int) -> tuple[tuple[TreePlace, TreePlace], ...]:
    """Return the places of each rank in the two trees.

    The first tree is in order: with ranks counted from 1, odd ones are leaves. The second is its
    mirror image if the number of ranks is even, else the same one rank further on: either way
    no rank has children in both.
    """
    first = [_parent(number, size) for number in range(1, size + 1)]
    if size % 2 == 0:
        other_rank = [size - 1 - rank for rank in range(size)]
    else:
        other_rank = [(rank + 1) % size for rank in range(size)]
    second: list[int | None] = [None] * size
    for rank, parent in enumerate(first):
        second[other_rank[rank]] = None if parent is None else other_rank[parent]
    return tuple(zip(_places(first), _places(second), strict=True))


def _parent(number: int, size: int) -> int | None:
    """Return the rank above the one with this number from 1 on, in the tree in order."""
    bit = number & -number
    above = number ^ bit | bit << 1
    if above > size:
        above = number ^ bit
    return above - 1 if above else None


def _places(parents: list[int | None]) -> list[TreePlace]:
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(rank)
    return [TreePlace(*place) for place in zip(parents, map(tuple, children), strict=True)]
