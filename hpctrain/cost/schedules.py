"""All-reduce algorithms between nodes as schedules of messages, for execution and for simulation.

The argument ``rank`` of a function is either the index of one rank, for the execution in
``hpctrain.comm.rail.algorithms``, or an array of all ranks, for ``hpctrain.cost.step``. The
docstrings state times for N ranks and a message of m bytes, where a is the latency and b is the
time per byte. No function is collective.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH"; for the ring, Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"; for two trees, Sanders, Speck and Träff 2009, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan", similar to the double trees of NCCL.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.units import KIB, MIB

Each = Any
"""An ``int`` for one rank, or an array with one integer per rank."""

NOBODY = -1
COPY, COMBINE, COMBINE_BEHIND = range(3)
"""Actions of a receiver: replace the local data, or combine them with the received data.

The local data are the first operand of ``COMBINE``, and the second operand of ``COMBINE_BEHIND``.
A message with the action ``COMBINE_BEHIND`` must contain all pieces.
"""


class Round(NamedTuple):
    """One round, in which each rank sends and receives at most one message of equal length."""

    dest: Each  # rank to send to, or ``NOBODY``
    outgoing: Each  # first piece to send
    source: Each  # rank to receive from, or ``NOBODY``
    incoming: Each  # first piece to receive
    num_pieces: int
    action: Each  # COPY, COMBINE or COMBINE_BEHIND


class Phase(NamedTuple):
    """Rounds that each rank executes in order; all sends complete before the next phase."""

    rounds: Iterable[Round]
    lead: int = 1
    """A send starts after the data received ``lead`` rounds earlier are combined or copied."""
    ahead: int = 1
    """Number of receives that are posted in advance."""
    window: float = 0
    """Number of sends that may be in flight while the rank combines received data.

    0 if a combination writes to memory from which the sends read.
    """
    runs: Sequence[tuple[Round, int]] = ()
    """Groups of consecutive rounds that differ only in their pieces, as pairs: the first round of
    the group, and the number of rounds."""

    def timed(self) -> Iterable[tuple[Round, int]]:
        """Return each round with its number of repetitions, for the simulation."""
        return self.runs or ((each, 1) for each in self.rounds)


def even_cut(numel: int, num_pieces: int) -> list[int]:
    """Return the bounds of pieces whose lengths differ by at most one element."""
    return [piece * numel // num_pieces for piece in range(num_pieces + 1)]


def halved_cut(numel: int, num_pieces: int) -> list[int]:
    """Return the bounds of the pieces that result from halving a message repeatedly."""
    bounds = [0, numel]
    while len(bounds) <= num_pieces:
        bounds = [0] + [b for start, stop in pairwise(bounds) for b in ((start + stop) // 2, stop)]
    return bounds


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """An all-reduce algorithm for two or more ranks."""

    phases: Callable[[Each, int, int], Iterator[Phase]]
    """Returns the phases for a rank, a number of ranks and a number of segments."""
    num_parts: Callable[[int], int] = lambda _: 1
    """Returns the number of parts of a message for a number of ranks."""
    segment_bytes: float = math.inf
    """Largest segment of a part; a segment is combined while the next one is in flight.

    The size is small enough to fill the pipeline quickly, and large enough to hide latency.
    """
    cut: Callable[[int, int], list[int]] = even_cut

    def num_segments(self, num_bytes: int, size: int) -> int:
        """Return the number of segments of each part of a message."""
        return max(1, int(-(-num_bytes // self.num_parts(size) // self.segment_bytes)))


class Fold(NamedTuple):
    """Pairs of ranks. One rank of each pair participates, so the number of participants is 2^k."""

    power: int
    num_pairs: int
    """Number of pairs. The ranks below ``2 * num_pairs`` form pairs (0, 1), (2, 3), ...; the even
    rank of a pair participates on behalf of both ranks."""
    place: Each  # index among the participating ranks, or ``NOBODY``
    other: Each  # other rank of the pair, or ``NOBODY``

    def rank_at(self, place: Each) -> Each:
        """Return the rank with this index among the participating ranks."""
        return _choose(place < self.num_pairs, 2 * place, place + self.num_pairs)


def fold(rank: Each, size: int) -> Fold:
    """Return the pairs for ``size`` ranks, and the place of ``rank`` in the pairs."""
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
    """Yield recursive doubling: in round k partners at distance 2^k exchange their partial sums.

    The time is about log2(N) (a + m b); two more rounds are needed if N is not a power of two.
    Both partners combine the data of the lower rank first, so their results are bitwise equal.
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
    """Yield a reduce-scatter by recursive halving, then an all-gather in the reverse order.

    If N is a power of two, the time is about 2 log2(N) a + 2(N-1)/N m b; no algorithm sends fewer
    bytes. For other N, ``fold`` forms pairs so that the largest power of two below N remains.
    Each pair combines its data on the even rank in 2 rounds of m/2 bytes; at the end the even rank
    sends the m bytes to the odd rank. This adds 3 a + 2 m b.
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
    reversed_rounds = []
    while distance < folded.power:
        partner = _choose(out, NOBODY, folded.rank_at(folded.place ^ distance))
        is_upper = (folded.place & distance) != 0
        kept = _choose(is_upper, start + half, start)
        given = 2 * start + half - kept
        yield Round(partner, given, partner, kept, half, COMBINE)
        reversed_rounds.append(Round(partner, kept, partner, given, half, COPY))
        start, half, distance = kept, half // 2, 2 * distance
    yield from reversed(reversed_rounds)
    if folded.num_pairs:
        yield Round(stays, 0, leaves, 0, folded.power, COPY)


def _ring(rank: Each, size: int, num_segments: int) -> Iterator[Phase]:
    """Yield a ring: part p of N is sent around from rank p, first combined and then copied.

    Part p is complete on rank p-1. The time is about 2(N-1) a + 2(N-1)/N m b. 16-bit floats are
    rounded at each of the N-1 combinations.

    Differs: a rank sends each segment of a part as soon as the segment is combined.
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
    """Yield a binomial tree: rank r has children r+1, r+2, r+4, ... below the lowest set bit of r.

    The parent combines the subtrees in order of distance. The time is about 2 log2(N) (a + m b),
    which is slower than doubling on an idle network, but sends only 2(N-1) messages in total.
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
    """Yield two binary trees: each reduces and then broadcasts one half of the message.

    Segments are pipelined. No rank has children in both trees, so a rank sends and receives the
    message at most twice. The first segment of s bytes takes 4 log2(N) (a + s b); the other
    segments take 4 to 5 m b more.

    Differs: messages are not coloured by rounds, so segments take 4 m b instead of 2 m b. All
    ranks belong to both trees, and the trees have different roots.
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
    """Yield the messages of a pipeline: in each step each segment advances by one tree level.

    Within a step the segments that arrived in the previous step are sent first, so a rank does not
    wait for two messages in succession. A rank may be a leaf of one tree and the root of the other
    tree. As a leaf, such a rank is ahead by as many segments as the trees have levels. If the rank
    processed the same segment in both trees, segments could not be pipelined.
    """
    for step in range(num_segments + len(levels) - 1):
        for level in reversed(range(len(levels))):
            turn = step - level
            if 0 <= turn < num_segments:
                for each in levels[level]:
                    outgoing, incoming = each.outgoing + turn, each.incoming + turn
                    yield each._replace(outgoing=outgoing, incoming=incoming)


def _levels(rank: Each, size: int, num_segments: int) -> Iterator[list[Round]]:
    """Yield, for each tree level, the rounds that send the first segment up both trees.

    Parents in one tree receive from their second child while parents in the other tree receive
    from their first child. A leaf of both trees therefore never sends two messages at once.
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
    """Return the parent to send to and the child to receive from, or ``NOBODY`` for each.

    The messages are those of one tree from the children with index ``child`` to the parents at
    ``level``.
    """
    place = tree_place(rank, size, tree)
    above = tree_place(place.parent, size, tree)
    is_next = (above.level_bit == 1 << level) & (above.children[child] == rank)
    dest = _choose((place.parent != NOBODY) & is_next, place.parent, NOBODY)
    return dest, _choose(place.level_bit == 1 << level, place.children[child], NOBODY)


class TreePlace(NamedTuple):
    """Parent and children of a rank in one of the two trees."""

    parent: Each  # ``NOBODY`` for the root
    children: tuple[Each, Each]  # lower rank first; ``NOBODY`` if absent
    level_bit: Each  # 1 for leaves, 2 or more for parents


def tree_place(rank: Each, size: int, tree: int) -> TreePlace:
    """Return parent and children of a rank in tree 0 or 1.

    Tree 0 is an in-order tree: with ranks counted from 1, odd ranks are leaves. If ``size`` is
    even, tree 1 is the mirror image of tree 0; otherwise tree 1 is tree 0, shifted by one rank. In
    both cases no rank has children in both trees.
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
"""Schedules by their names in a plan."""
