"""Check schedules: for one rank or for all ranks they are equal; each share is summed once."""

import math

import numpy as np
import pytest

from hpctrain.cost.schedules import COPY, NOBODY, SCHEDULES, Round, tree_place

SIZES = (2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 31, 33)


def rounds_of(name, rank, size):
    phases = SCHEDULES[name].phases(rank, size, 2)
    return [each for phase in phases for each in phase.rounds]


def for_each(rounds, size):
    """Return rounds in which every field has a value for each rank."""
    return [Round(*(np.broadcast_to(field, size) for field in each)) for each in rounds]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_the_schedule_of_one_rank_equals_its_part_of_the_whole_schedule(name, size):
    together = for_each(rounds_of(name, np.arange(size), size), size)
    for rank in range(size):
        alone = rounds_of(name, rank, size)
        mine_of_all = [r for r in together if r.dest[rank] != NOBODY or r.source[rank] != NOBODY]
        alone = [r for r in alone if r.dest != NOBODY or r.source != NOBODY]
        for mine, every in zip(alone, mine_of_all, strict=True):
            assert (mine.dest, mine.source) == (every.dest[rank], every.source[rank])
            if mine.dest != NOBODY:
                assert mine.outgoing == every.outgoing[rank]
            if mine.source != NOBODY:
                assert (mine.incoming, mine.action) == (every.incoming[rank], every.action[rank])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_ends_with_the_share_of_each_rank_once(name, size):
    schedule = SCHEDULES[name]
    num_segments = 1 if schedule.segment_bytes == math.inf else 2
    num_pieces = schedule.num_parts(size) * num_segments
    shares = np.zeros(
        (size, num_pieces, size), dtype=int
    )  # rank, piece, owner of the share: count
    shares[np.arange(size), :, np.arange(size)] = 1
    for each in for_each(rounds_of(name, np.arange(size), size), size):
        before = shares.copy()
        for rank in np.nonzero(each.source != NOBODY)[0]:
            source, num = each.source[rank], each.num_pieces[rank]
            assert each.dest[source] == rank
            assert each.outgoing[source] == each.incoming[rank]
            pieces = slice(each.incoming[rank], each.incoming[rank] + num)
            kept = 0 if each.action[rank] == COPY else shares[rank, pieces]
            shares[rank, pieces] = kept + before[source, pieces]
    assert (shares == 1).all()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_runs_of_rounds_are_the_rounds_but_for_their_pieces(name, size):
    both = (SCHEDULES[name].phases(np.arange(size), size, 3) for _ in range(2))
    for phase, timed in zip(*both, strict=True):
        expanded = [each for each, repeats in timed.timed() for _ in range(repeats)]
        for one, other in zip(expanded, phase.rounds, strict=True):
            assert (one.source == other.source).all()
            assert one.num_pieces == other.num_pieces
            assert np.all(one.action == other.action)


@pytest.mark.parametrize("size", [*range(2, 70), 255, 256, 257, 1000])
def test_two_trees_span_all_ranks_and_share_no_inner_one(size):
    trees = [tree_place(np.arange(size), size, tree) for tree in range(2)]
    inner = [place.children[0] != NOBODY for place in trees]
    assert not (inner[0] & inner[1]).any()
    for place in trees:
        assert (place.parent == NOBODY).sum() == 1
        for rank in range(size):
            children = [child[rank] for child in place.children if child[rank] != NOBODY]
            assert children == sorted(np.nonzero(place.parent == rank)[0])
            above, height = place.parent[rank], 0
            while above != NOBODY:
                above, height = place.parent[above], height + 1
            assert height <= math.ceil(math.log2(size + 1))
