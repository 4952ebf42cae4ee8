"""Check pairs of ranks: every pair is measured, and all ranks get the results."""

import time
from itertools import islice

import pytest

from hpctrain.comm.factory import connect
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.core.config import Settings
from hpctrain.doctor.checks.facts import MeasuredLink, TrafficFacts, WorldFacts
from hpctrain.doctor.checks.network import check_clocks, offsets
from hpctrain.doctor.ranks.traffic import measure, rounds
from tests.harness.growth import MAX_SLOPE, slope_of

TOGETHER = pytest.mark.ranks(2, 3, 4)


@pytest.mark.parametrize("ranks", [[], [3], [0, 4], [1, 2, 8], list(range(0, 20, 2)), range(11)])
def test_all_pairs_occur_once_in_rounds_without_a_rank_twice(ranks):
    ranks = list(ranks)
    found = list(rounds(ranks))
    for pairs in found:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
    met = [pair for pairs in found for pair in pairs]
    assert sorted(met) == [(a, b) for a in sorted(ranks) for b in sorted(ranks) if a < b]


def test_the_first_rounds_are_made_in_linear_time():
    def first_rounds(num_nodes):
        return lambda: list(islice(rounds(range(num_nodes)), 3))

    assert slope_of(first_rounds, (64, 1024)) < MAX_SLOPE


@TOGETHER
def test_all_ranks_know_all_figures(world):
    comm = MpiCommunicator(world.Dup())
    for pairs in rounds(range(world.size)):
        links = measure(comm, pairs)
        assert [link.ranks for link in links] == pairs
        assert all(link.latency_s > 0 and link.bytes_per_s > 0 for link in links)
        assert all(link.sent_bytes > 0 for link in links)
        assert world.allgather(links) == [links] * world.size
    assert measure(comm, []) == []
    comm.close()


@TOGETHER
def test_a_fast_clock_is_found_within_the_reported_error(world, monkeypatch):
    ahead = 7.5 * world.rank
    monkeypatch.setenv("HPCTRAIN_RANKS_PER_NODE", "1")
    connection = connect(world.Dup(), Settings(ranks_per_node=1))
    links = []
    for pairs in rounds(range(world.size)):
        links += measure(connection.comm, pairs, clock=lambda: time.time() + ahead)
    found = offsets(links, 0)
    assert found.keys() == set(range(world.size))
    for rank, (offset, error) in found.items():
        assert abs(offset - 7.5 * rank) <= error + 1e-6
    facts = WorldFacts(ranks=(), topology=connection.topology, traffic=TrafficFacts(between=links))
    finding = check_clocks(facts)
    assert finding.level == "warning"
    assert f"#{world.size} is " in finding.what
    connection.presence.wait_for_end()
    connection.comm.close()


def link(first, second, clock_s, clock_error_s=0.001):
    return MeasuredLink(
        ranks=(first, second),
        latency_s=1e-5,
        bytes_per_s=1e9,
        clock_s=clock_s,
        clock_error_s=clock_error_s,
    )


def test_clocks_are_compared_along_a_path_and_errors_add_up():
    found = offsets([link(2, 4, 3.0), link(0, 4, 1.0), link(6, 8, 9.0)], 0)
    assert found == {0: (0.0, 0.0), 4: (1.0, 0.001), 2: (-2.0, 0.002)}
