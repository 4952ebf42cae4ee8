"""Two-phase commit in shared memory: all ranks commit the same operations, or rank 0 aborts."""

import random

import numpy as np
import pytest

from hpctrain.comm.control_channel.mailbox import WORDS, NodeChannel, tree_of
from hpctrain.negotiation.fast_path import NodeCommit, PathState


class Ranks:
    """Ranks that run alternately in one process, and the operation that each has prepared."""

    def __init__(self, size):
        words = np.zeros(WORDS * size, np.int64).data
        self.rung = [0] * size
        bells = [lambda rank=rank: self.ring(rank) for rank in range(size)]
        ranks = list(range(size))
        channels = [NodeChannel(words, tree_of([ranks], r), bells, None, None) for r in ranks]
        self.commits = [NodeCommit(channel) for channel in channels]
        self.prepared = [None] * size
        self.is_busy = [False] * size
        self.log = [[] for _ in ranks]

    def ring(self, rank):
        self.rung[rank] += 1

    def prepare(self, rank, number):
        self.commits[rank].prepare(number)
        self.prepared[rank], self.is_busy[rank] = number, False

    def set_busy(self, rank, *, busy):
        self.commits[rank].set_busy(busy=busy)
        self.is_busy[rank] = busy

    def look(self, rank):
        verdict = self.commits[rank].poll()
        if verdict is not None:
            if verdict:
                self.log[rank].append(self.prepared[rank])
            elif rank == 0:
                self.commits[0].set_busy(busy=True)
            self.prepared[rank] = None
        return verdict


@pytest.mark.parametrize("size", [2, 3, 7])
def test_any_interleaving_commits_the_same_operations_on_all_ranks(size):
    for seed in range(60):
        ranks, chance = Ranks(size), random.Random(seed)
        unlike = chance.choice((0.0, 0.1))
        for _ in range(600):
            rank = chance.randrange(size)
            if ranks.prepared[rank] is not None:
                before = len(ranks.log[0])
                behind = [number for number in ranks.prepared[1:] if number is None]
                if ranks.look(rank) and rank == 0:
                    assert not behind
                    assert not any(ranks.is_busy)
                    assert len(ranks.log[0]) == before + 1
            elif ranks.is_busy[rank] and chance.random() < 0.5:
                ranks.set_busy(rank, busy=False)
            elif chance.random() < unlike:
                ranks.set_busy(rank, busy=True)
            else:
                number = len(ranks.log[rank]) if chance.random() < 0.98 else 7777
                ranks.prepare(rank, number)
        longest = max(map(len, ranks.log))
        assert longest - min(map(len, ranks.log)) <= 1
        for log in ranks.log:
            assert log == ranks.log[0][: len(log)]
        if not unlike:
            assert longest > 3


def test_rank_0_aborts_if_a_rank_is_busy_or_has_prepared_another_operation():
    for number, busy in ((5, False), (3, True)):
        ranks = Ranks(3)
        ranks.prepare(0, 3)
        ranks.prepare(1, 3)
        assert ranks.look(0) is None
        assert ranks.look(1) is None
        if busy:
            ranks.set_busy(2, busy=True)
        else:
            ranks.prepare(2, number)
        assert ranks.look(0) is False
        assert ranks.look(1) is False
        assert ranks.rung[1]


def test_sleeping_ranks_are_woken_along_the_tree():
    ranks = Ranks(7)
    for rank in range(7):
        ranks.prepare(rank, 0)
    assert ranks.rung[0] >= 6
    assert ranks.look(0)
    assert [bool(num) for num in ranks.rung[1:]] == [True] * 4 + [False] * 2
    assert ranks.look(1)
    assert all(ranks.rung)


def test_a_prepared_operation_counts_for_one_commit_only():
    ranks = Ranks(2)
    for rank in (1, 0):
        ranks.prepare(rank, 0)
    assert ranks.look(0)
    ranks.prepare(0, 0)
    assert ranks.look(0) is None
    assert ranks.look(1)
    assert ranks.look(0) is None


def test_a_rank_that_becomes_busy_again_is_detected():
    ranks = Ranks(2)
    ranks.set_busy(1, busy=True)
    ranks.prepare(1, 0)
    ranks.prepare(0, 0)
    assert ranks.look(0)
    assert ranks.look(1)
    ranks.set_busy(1, busy=True)
    ranks.prepare(0, 1)
    assert ranks.look(0) is False


def test_states_and_results_follow_the_table():
    ranks = Ranks(2)
    root, other = ranks.commits
    for number, is_committed in ((0, True), (1, False)):
        assert (root.state, other.state) == (PathState.IDLE, PathState.IDLE)
        other.set_busy(busy=True)
        assert other.state is PathState.BUSY
        other.prepare(number)
        root.prepare(number if is_committed else 7)
        assert (root.state, other.state) == (PathState.PREPARED, PathState.PREPARED)
        assert other.poll() is None
        assert root.poll() is is_committed
        assert root.state is PathState.IDLE
        if not is_committed:
            root.set_busy(busy=True)
            assert root.state is PathState.BUSY
        assert other.poll() is is_committed
        root.set_busy(busy=False)
    root.prepare(2)
    assert root.withdraw()
    assert root.state is PathState.IDLE
    assert root.poll() is False
    other.prepare(2)
    assert not other.withdraw()
    other.set_busy(busy=True)
    assert other.state is PathState.BUSY
    assert other.poll() is False
