"""The all-reduces between nodes as rounds of messages: what ranks carry out and a model times.

A schedule is written once, elementwise in the rank: ``rank`` is the number of one rank, which
carries the rounds out (``hpctrain.comm.rail.algorithms``), or an array of all ranks, whose
messages ``hpctrain.cost.simulate`` times. Times below are of N ranks and a message of m bytes,
with a seconds of latency and b seconds per byte. Pure.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH"; of the ring, Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"; of two trees, Sanders, Speck and Träff 2009, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan", which NCCL's double trees are like.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    runs: Sequence[tuple[Round, int]] = ()
    """Where many rounds in a row differ in their pieces alone: one of them, and how many."""

    def timed(self) -> Iterable[tuple[Round, int]]:
        """Return the rounds for who times them, each with how many are like it."""
        return self.runs or ((each, 1) for each in self.rounds)


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
    power = _power_below(size)
    num_pairs = size - power
    paired = rank < 2 * num_pairs
    place = _choose(paired, _choose(rank % 2 == 0, rank // 2, NOBODY), rank - num_pairs)
    return Fold(power, num_pairs, place, _choose(paired, rank ^ 1, NOBODY))


def _choose(condition: Any, yes: Each, no: Each) -> Each:
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def _doubling(rank: Each, size: int) -> Iterator[Round]:
    """In round k ranks exchange all they have with the one 2^k further on or back.

    About log2(N) (a + m b), and two more rounds if N is no power of two. Both partners combine the
    same two tensors with the lower rank's first, hence to the same bits.
    """
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


def _halving(rank: Each, size: int) -> Iterator[Round]:
    """A reduce-scatter in which partners send each other half of what they have, and back.

    The all-gather goes the same way back. About 2 log2(N) a + 2(N-1)/N m b for N a power of two,
    the least bytes possible; two ranks just exchange halves. Other N take 3 rounds and up to 3/2
    of the message more, to take in the odd ones of the first 2r ranks (r above the power of two)
    and to tell them the result.
    """
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
        kept = _choose(is_upper, start + half, start)
        given = 2 * start + half - kept
        yield Round(partner, given, partner, kept, half, COMBINE)
        way_back.append(Round(partner, kept, partner, given, half, COPY))
        start, half, distance = kept, half // 2, 2 * distance
    yield from reversed(way_back)
    if folded.num_pairs:
        yield Round(stays, 0, leaves, 0, folded.power, COPY)


def _ring(rank: Each, size: int, num_segments: int) -> Iterator[Phase]:
    """Part p of N travels the ring from rank p on, to be combined, then once more to be copied.

    It is combined in that order and complete on rank p-1. About 2(N-1) a + 2(N-1)/N m b. 16-bit
    floats are rounded at each of the N-1 combinations.

    Differs: a rank passes each segment of a part on as soon as it is combined.
    """
    steps = range(2 * size - 2)
    yield Phase(
        (each for step in steps for each in _ring_step(rank, size, num_segments, step)),
        lead=num_segments,
        ahead=min(2, num_segments),
        window=num_segments,
        runs=[
            (next(_ring_step(rank, size, num_segments, step)), (size - 1) * num_segments)
            for step in (0, size - 1)
        ],
    )


def _ring_step(rank: Each, size: int, num_segments: int, step: int) -> Iterator[Round]:
    outgoing, incoming = ((rank - behind) % size * num_segments for behind in (step, step + 1))
    dest, source = (rank + 1) % size, (rank - 1) % size
    for turn in range(num_segments):
        action = COMBINE if step < size - 1 else COPY
        yield Round(dest, outgoing + turn, source, incoming + turn, 1, action)


def _tree(rank: Each, size: int) -> Iterator[Round]:
    """A binomial tree: children are 1, 2, 4, ... further on, up to the rank's lowest set bit.

    Their subtrees are combined in that order. About 2 log2(N) (a + m b): slower than doubling on a
    quiet network, but it sends only 2(N-1) messages in all.
    """
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
    message twice at most: 4 log2(N) (a + s b) until the first segment of s bytes is there, and 4
    to 5 m b until the last is.

    Differs: messages are not coloured by rounds, so the last segment is there after 4 m b and not
    2 m b; all ranks belong to both trees, each of which has a root of its own.
    """
    up = list(_levels(rank, size, num_segments))
    down = [[_answer(each) for each in level] for level in reversed(up)]
    ahead = 2 * min(2, num_segments)
    yield Phase(_wave(up, num_segments), ahead=ahead, window=math.inf)
    yield Phase(_wave(down, num_segments), ahead=4, window=math.inf)


def _answer(message: Round) -> Round:
    return Round(
        message.source, message.incoming, message.dest, message.outgoing, message.num_pieces, COPY
    )


def _wave(levels: list[list[Round]], num_segments: int) -> Iterator[Round]:
    """Let each segment of each half pass one level of its tree in each step.

    First what came a step ago goes on, so nobody waits for two messages in a row. And a leaf of
    one tree, which may be the root of the other, is as many segments ahead there as the trees are
    high; if it took the same segment in both, none could follow another.
    """
    for step in range(num_segments + len(levels) - 1):
        for level in reversed(range(len(levels))):
            turn = step - level
            if 0 <= turn < num_segments:
                for each in levels[level]:
                    outgoing, incoming = each.outgoing + turn, each.incoming + turn
                    yield each._replace(outgoing=outgoing, incoming=incoming)


def _levels(rank: Each, size: int, num_segments: int) -> Iterator[list[Round]]:
    """Yield the rounds up both trees for each level of parents, for their first segments.

    While parents in one tree take what their second child sends, those in the other take what
    their first one does: so no rank, even if it is a leaf of both, sends two messages at once.
    """
    nothing = 0 * rank + NOBODY, 0 * rank + NOBODY
    for level in range(1, size.bit_length()):
        one, other = (
            [_up(rank, size, tree, level, child) for child in range(2)] for tree in range(2)
        )
        rounds = []
        for mine, theirs in ((one[0], nothing), (one[1], other[0]), (nothing, other[1])):
            dest, source = (_choose(m == NOBODY, t, m) for m, t in zip(mine, theirs, strict=True))
            outgoing, incoming = (_choose(m == NOBODY, num_segments, 0) for m in mine)
            rounds.append(Round(dest, outgoing, source, incoming, 1, COMBINE))
        yield rounds


def _up(rank: Each, size: int, tree: int, level: int, child: int) -> tuple[Each, Each]:
    """Return to whom and from whom a message goes up to a parent of this level in one tree."""
    place = tree_place(rank, size, tree)
    above = tree_place(place.parent, size, tree)
    is_next = (above.level_bit == 1 << level) & (above.children[child] == rank)
    dest = _choose((place.parent != NOBODY) & is_next, place.parent, NOBODY)
    return dest, _choose(place.level_bit == 1 << level, place.children[child], NOBODY)


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


def _one_phase(rounds: Callable[[Each, int], Iterator[Round]]) -> Any:
    return lambda rank, size, _: iter([Phase(rounds(rank, size))])


def _power_below(size: int) -> int:
    return 1 << (size.bit_length() - 1)


SCHEDULES = {
    "doubling": Schedule(_one_phase(_doubling)),
    "halving": Schedule(_one_phase(_halving), num_parts=_power_below, cut=halved_cut),
    "ring": Schedule(_ring, num_parts=lambda size: size, segment_bytes=MIB),
    "tree": Schedule(_one_phase(_tree)),
    "double_tree": Schedule(_double_tree, num_parts=lambda _: 2, segment_bytes=256 * KIB),
}
"""By the name that a plan gives them."""
