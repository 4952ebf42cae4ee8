"""The all-reduces between nodes as rounds of messages: what ranks carry out and a model times.

A schedule is written once, elementwise in the rank: ``rank`` is the number of one rank, which
carries the rounds out (``hpctrain.comm.rail.algorithms``), or an array of all ranks, whose
messages ``hpctrain.cost.simulate`` times. Pure.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.units import KIB, MIB

Each = Any
"""An ``int`` for one rank, or an array of integers with one for each rank."""

NOBODY = -1
COPY, COMBINE, COMBINE_BEHIND = range(3)
"""What becomes of what arrives: it replaces what is there, or is combined with it; what is there
comes first, or behind, which takes a message of all pieces."""


class Round(NamedTuple):
    """At most one message from each rank and one to it; all of them are equally long."""

    dest: Each  # to whom a rank sends, or NOBODY
    outgoing: Each  # the first piece that it sends
    source: Each  # from whom it receives, or NOBODY
    incoming: Each  # the first piece that it receives
    num_pieces: int
    action: Each  # COPY, COMBINE or COMBINE_BEHIND


class Phase(NamedTuple):
    """Rounds as each rank takes them, one after the other; at the end its sends are finished."""

    rounds: Iterable[Round]
    lead: int = 1
    """A send starts as soon as what was received ``lead`` rounds before is dealt with."""
    ahead: int = 1
    """How many receives are posted all the time."""
    window: float = 0
    """How many sends may be unfinished while what arrives is combined; 0 where they read that."""


def even_cut(numel: int, num_pieces: int) -> list[int]:
    """Return where pieces begin that differ by one element at most, and where the last ends."""
    return [piece * numel // num_pieces for piece in range(num_pieces + 1)]


def halved_cut(numel: int, num_pieces: int) -> list[int]:
    """Return the same of pieces that come from cutting into halves, and these again."""
    bounds = [0, numel]
    while len(bounds) <= num_pieces:
        bounds = [0] + [b for start, stop in pairwise(bounds) for b in ((start + stop) // 2, stop)]
    return bounds


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """An all-reduce among two or more ranks."""

    phases: Callable[[Each, int, int], Iterator[Phase]]
    """Of the rank, the number of ranks and that of segments."""
    num_parts: Callable[[int], int] = lambda _: 1
    """Into how many parts the message is cut among so many ranks."""
    segment_bytes: float = math.inf
    """Longer parts are cut into segments: one is combined while the next is on its way. Small
    enough to fill a tree quickly, large enough to hide the latency of a message."""
    cut: Callable[[int, int], list[int]] = even_cut

    def num_segments(self, num_bytes: int, size: int) -> int:
        """Return into how many segments each part of a message is cut."""
        return max(1, int(-(-num_bytes // self.num_parts(size) // self.segment_bytes)))


class Fold(NamedTuple):
    """How the ranks are brought down to a power of two."""

    power: int
    num_pairs: int
    """Of the first ``2 num_pairs`` ranks the even ones take part for the odd ones too."""
    place: Each  # where a rank stands among those that take part; NOBODY if another does for it
    other: Each  # the rank for which it takes part, or the reverse; NOBODY if there is none

    def rank_at(self, place: Each) -> Each:
        """Return the rank that stands at this place."""
        return _choose(place < self.num_pairs, 2 * place, place + self.num_pairs)


def fold(rank: Each, size: int) -> Fold:
    """Let as many even ones of the first ranks take part for their odd neighbours as needed."""
    power = 1 << (size.bit_length() - 1)
    num_pairs = size - power
    paired = rank < 2 * num_pairs
    place = _choose(paired, _choose(rank % 2 == 0, rank // 2, NOBODY), rank - num_pairs)
    return Fold(power, num_pairs, place, _choose(paired, rank ^ 1, NOBODY))


def _choose(condition: Any, yes: Each, no: Each) -> Each:
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def _doubling(rank: Each, size: int, _: int) -> Iterator[Phase]:
    """In round k ranks exchange all they have with the one 2^k further on or back.

    log2(N) rounds of m bytes each, so about log2(N) (a + m b) for a message of m bytes, a seconds
    of latency and b seconds per byte. Two more rounds if N is no power of two. Both partners
    combine the same two tensors with the lower rank's first, hence to the same bits.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", recursive doubling in the section on all-reduce.
    """
    yield Phase(_doubling_rounds(rank, size))


def _doubling_rounds(rank: Each, size: int) -> Iterator[Round]:
    folded = fold(rank, size)
    out = folded.place == NOBODY
    stays, leaves = _choose(out, NOBODY, folded.other), _choose(out, folded.other, NOBODY)
    if folded.num_pairs:
        yield Round(leaves, 0, stays, 0, 1, COMBINE)
    distance = 1
    while distance < folded.power:
        partner = _choose(out, NOBODY, folded.rank_at(folded.place ^ distance))
        yield Round(partner, 0, partner, 0, 1, _choose(partner < rank, COMBINE_BEHIND, COMBINE))
        distance *= 2
    if folded.num_pairs:
        yield Round(stays, 0, leaves, 0, 1, COPY)


def _halving(rank: Each, size: int, _: int) -> Iterator[Phase]:
    """A reduce-scatter in which partners send each other half of what they have, and back.

    The all-gather goes the same way back. For N a power of two: 2 log2(N) rounds and 2(N-1)/N of
    the message, the least possible, so about 2 log2(N) a + 2(N-1)/N m b for a message of m bytes,
    a seconds of latency and b seconds per byte; two ranks just exchange halves. Other N take 3
    rounds and up to 3/2 of the message more, to take in the odd ones of the first 2r ranks (r
    above the power of two) and to tell them the result.

    Source: Rabenseifner 2004, "Optimization of collective reduction operations", recursive
    halving and doubling; the odd ranks: Thakur, Rabenseifner and Gropp 2005, "Optimization of
    collective communication operations in MPICH", section on reduce.
    """
    yield Phase(_halving_rounds(rank, size))


def _halving_rounds(rank: Each, size: int) -> Iterator[Round]:
    folded = fold(rank, size)
    out = folded.place == NOBODY
    stays, leaves = _choose(out, NOBODY, folded.other), _choose(out, folded.other, NOBODY)
    half = folded.power // 2
    if folded.num_pairs:
        kept, given = _choose(out, half, 0), _choose(out, 0, half)
        yield Round(folded.other, given, folded.other, kept, half, COMBINE)
        yield Round(leaves, half, stays, half, half, COPY)
    start, distance = 0 * rank, 1
    way_back = []
    while distance < folded.power:
        partner = _choose(out, NOBODY, folded.rank_at(folded.place ^ distance))
        is_upper = (folded.place & distance) != 0
        kept, given = (
            _choose(is_upper, start + half, start),
            _choose(is_upper, start, start + half),
        )
        yield Round(partner, given, partner, kept, half, COMBINE)
        way_back.append(Round(partner, kept, partner, given, half, COPY))
        start, half, distance = kept, half // 2, 2 * distance
    yield from reversed(way_back)
    if folded.num_pairs:
        yield Round(stays, 0, leaves, 0, folded.power, COPY)


def _ring(rank: Each, size: int, num_segments: int) -> Iterator[Phase]:
    """Part p of N travels the ring from rank p on, to be combined, then once more to be copied.

    It is combined in that order and complete on rank p-1. 2(N-1) rounds; the time is about
    2(N-1) a + 2(N-1)/N m b for a message of m bytes, a seconds of latency and b seconds per byte.
    16-bit floats are rounded at each of the N-1 combinations.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", the ring for all-reduce.
    Differs: a rank passes each segment of a part on as soon as it is combined.
    """
    yield Phase(
        _ring_rounds(rank, size, num_segments),
        lead=num_segments,
        ahead=min(2, num_segments),
        window=num_segments,
    )


def _ring_rounds(rank: Each, size: int, num_segments: int) -> Iterator[Round]:
    dest, source = (rank + 1) % size, (rank - 1) % size
    part = rank
    for step in range(2 * size - 2):
        outgoing, part = part * num_segments, (part - 1) % size
        incoming = part * num_segments
        action = COMBINE if step < size - 1 else COPY
        for turn in range(num_segments):
            yield Round(dest, outgoing + turn, source, incoming + turn, 1, action)


def _tree(rank: Each, size: int, _: int) -> Iterator[Phase]:
    """A binomial tree: children are 1, 2, 4, ... further on, up to the rank's lowest set bit.

    Their subtrees are combined in that order. 2 ceil(log2 N) rounds of the whole message, so about
    2 log2(N) (a + m b) for a message of m bytes, a seconds of latency and b seconds per byte.
    Slower than doubling on a quiet network, but it sends only 2(N-1) messages in all.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
    operations in MPICH", binomial tree in the sections on broadcast and reduce.
    """
    yield Phase(_tree_rounds(rank, size))


def _tree_rounds(rank: Each, size: int) -> Iterator[Round]:
    distances = [1 << level for level in range((size - 1).bit_length())]
    for action in (COMBINE, COPY):
        for distance in distances if action == COMBINE else reversed(distances):
            has_child = (rank % (2 * distance) == 0) & (rank + distance < size)
            child = _choose(has_child, rank + distance, NOBODY)
            parent = _choose(rank % (2 * distance) == distance, rank - distance, NOBODY)
            dest, source = (parent, child) if action == COMBINE else (child, parent)
            yield Round(dest, 0, source, 0, 1, action)


def _double_tree(rank: Each, size: int, num_segments: int) -> Iterator[Phase]:
    """Each half of the message goes up one of two binary trees, combined, and down again.

    Segments follow each other. No rank has children in both trees, so each sends and receives the
    message twice at most: about 4 log2(N) (a + s b) + 2 m b for a message of m bytes, segments of
    s bytes, a seconds of latency and b seconds per byte.

    Source: Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", reduction and broadcast; NCCL's double trees are alike.
    Differs: messages are not coloured by rounds, since links work both ways and MPI keeps the
    order; all ranks belong to both trees, each of which has a root of its own.
    """
    up = [list(_tree_messages(rank, size, tree)) for tree in range(2)]
    down = [[_answer(message) for message in reversed(messages)] for messages in up]
    ahead = 2 * min(2, num_segments)
    yield Phase(_segment_rounds(up, num_segments), ahead=ahead, window=math.inf)
    yield Phase(_segment_rounds(down, num_segments), ahead=4, window=math.inf)


def _segment_rounds(trees: list[list[Round]], num_segments: int) -> Iterator[Round]:
    """Let a segment of each half in turn take the messages of its tree."""
    for turn in range(num_segments):
        for tree, messages in enumerate(trees):
            piece = tree * num_segments + turn
            for message in messages:
                yield message._replace(outgoing=piece, incoming=piece)


def _answer(message: Round) -> Round:
    return message._replace(dest=message.source, source=message.dest, action=COPY)


def _tree_messages(rank: Each, size: int, tree: int) -> Iterator[Round]:
    """Yield the rounds up one tree: by the level of the parent, one child after the other."""
    place = tree_place(rank, size, tree)
    above = tree_place(place.parent, size, tree)
    for level in range(1, size.bit_length()):
        for mine, sibling in zip(place.children, above.children, strict=True):
            source = _choose(place.level_bit == 1 << level, mine, NOBODY)
            is_next = (
                (place.parent != NOBODY) & (above.level_bit == 1 << level) & (sibling == rank)
            )
            dest = _choose(is_next, place.parent, NOBODY)
            yield Round(dest, 0, source, 0, 1, COMBINE)


class TreePlace(NamedTuple):
    """Where a rank stands in one of two trees."""

    parent: Each  # NOBODY for the root
    children: tuple[Each, Each]  # the lower rank first, or NOBODY
    level_bit: Each  # 1 for leaves, twice as much or more for their parents


def tree_place(rank: Each, size: int, tree: int) -> TreePlace:
    """Return the place of a rank in tree 0 or 1.

    The first tree is in order: with ranks counted from 1, odd ones are leaves. The second is its
    mirror image if the number of ranks is even, else the same one rank further on: either way
    no rank has children in both.
    """

    def rank_of(number: Each) -> Each:
        return (number - 1, size - number, number % size)[kind]

    kind = 0 if tree == 0 else 1 + size % 2
    number = (rank + 1, size - rank, (rank - 1) % size + 1)[kind]
    bit = number & -number
    above = number ^ bit | bit << 1
    above = _choose(above > size, number ^ bit, above)
    step = bit // 2
    for _ in range(size.bit_length()):  # the right subtree may lack its upper levels
        step = _choose(number + step > size, step // 2, step)
    left, right = rank_of(number - bit // 2), rank_of(number + step)
    swapped = (step > 0) & (right < left)
    first, second = _choose(swapped, right, left), _choose(swapped, left, right)
    return TreePlace(
        parent=_choose(above == 0, NOBODY, rank_of(above)),
        children=(_choose(bit == 1, NOBODY, first), _choose(step == 0, NOBODY, second)),
        level_bit=bit,
    )


SCHEDULES = {
    "doubling": Schedule(_doubling),
    "halving": Schedule(
        _halving, num_parts=lambda size: 1 << (size.bit_length() - 1), cut=halved_cut
    ),
    "ring": Schedule(_ring, num_parts=lambda size: size, segment_bytes=MIB),
    "tree": Schedule(_tree),
    "double_tree": Schedule(_double_tree, num_parts=lambda _: 2, segment_bytes=256 * KIB),
}
"""By the name that a plan gives them."""
