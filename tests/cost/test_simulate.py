"""Check simulated collectives: closed forms, messages of each rank, and times of SimGrid."""

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost.collectives import AllreduceSpec, allreduce
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.schedules import COPY, NOBODY, SCHEDULES
from hpctrain.cost.step import allreduce_times

ORACLE = json.loads((Path(__file__).parents[2] / "perf/results/simgrid.json").read_text())
LATENCY_S, BYTES_PER_S = 2e-6, 10e9
FLAT = Link(LATENCY_S, BYTES_PER_S)


def flat(ranks, **more):
    return Machine(nodes=ranks, network=FLAT, **more)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize("num_bytes", [1 << 13, 1 << 20])
def test_times_of_a_flat_network_equal_the_closed_forms(ranks, num_bytes):
    rounds, share, whole_s = math.log2(ranks), (ranks - 1) / ranks, num_bytes / BYTES_PER_S
    expected = {
        "ring": 2 * (ranks - 1) * LATENCY_S + 2 * share * whole_s,
        "halving": 2 * rounds * LATENCY_S + 2 * share * whole_s,
        "doubling": rounds * (LATENCY_S + whole_s),
        "tree": 2 * rounds * (LATENCY_S + whole_s),
    }
    combined = {"ring": share, "halving": share, "doubling": rounds, "tree": rounds}
    for name, seconds in expected.items():
        assert allreduce_times(AllreduceSpec(name), num_bytes, flat(ranks)).max() == pytest.approx(
            seconds
        )
        adding = flat(ranks, reduce_bytes_per_s=5e9)
        both = seconds + combined[name] * num_bytes / 5e9
        assert allreduce_times(AllreduceSpec(name), num_bytes, adding).max() == pytest.approx(both)


@pytest.mark.parametrize("ranks", [2, 3, 8, 17, 64, 1000])
def test_segments_of_a_double_tree_follow_each_other(ranks):
    num_bytes, segment_bytes = 100 << 20, 256 << 10
    first_s = 4 * math.log2(ranks) * (LATENCY_S + segment_bytes / BYTES_PER_S)
    seconds = allreduce_times(AllreduceSpec("double_tree"), num_bytes, flat(ranks)).max()
    assert 2 * num_bytes / BYTES_PER_S < seconds < first_s + 5.2 * num_bytes / BYTES_PER_S


def one_by_one(name, num_bytes, machine, start):
    """Simulate messages one by one, instead of all messages of a round together."""
    size, link = machine.num_ranks, machine.network
    schedule = SCHEDULES[name]
    num_segments = schedule.num_segments(num_bytes, size)
    piece_bytes = num_bytes / schedule.num_parts(size) / num_segments
    ready, sent, received, delivered = list(start), *([-math.inf] * size for _ in range(3))
    for phases in zip(*(schedule.phases(r, size, num_segments) for r in range(size)), strict=True):
        past = [list(ready)] * phases[0].lead
        for rounds in zip(*(phase.rounds for phase in phases), strict=True):
            seconds = rounds[0].num_pieces * piece_bytes / link.bytes_per_s
            combining_s = rounds[0].num_pieces * piece_bytes / machine.reduce_bytes_per_s
            after = list(ready)
            for rank, each in enumerate(rounds):
                if (source := each.source) == NOBODY:
                    continue
                leaves = max(past[-phases[0].lead][source], sent[source])
                received[rank] = seconds + max(leaves + link.latency_s, received[rank])
                sent[source] = received[rank] - link.latency_s
                delivered[source] = received[rank]
                after[rank] = max(after[rank], received[rank])
                after[rank] += combining_s * (each.action != COPY)
            if not phases[0].window:
                after = [
                    max(time, delivered[rank]) if each.dest != NOBODY else time
                    for rank, (time, each) in enumerate(zip(after, rounds, strict=True))
                ]
            ready = after
            past.append(list(ready))
        ready = [max(both) for both in zip(ready, delivered, strict=True)]
    return ready


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("num_bytes", [1000, 9 << 20])
def test_all_ranks_at_once_take_as_long_as_one_by_one(name, ranks, num_bytes):
    machine = flat(ranks, reduce_bytes_per_s=20e9)
    start = np.random.default_rng(ranks).lognormal(-8, 1, ranks)
    expected = one_by_one(name, num_bytes, machine, start)
    assert allreduce_times(AllreduceSpec(name), num_bytes, machine, start) == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("spread_s", [0.0, 1e-6, 1e-4])
def test_a_long_ring_takes_as_long_as_one_by_one(spread_s):
    machine = flat(100, reduce_bytes_per_s=20e9)
    start = spread_s * np.random.default_rng(0).random(100)
    expected = one_by_one("ring", 100_000, machine, start)
    times = allreduce_times(AllreduceSpec("ring"), 100_000, machine, start)
    assert times == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_move_with_the_start_and_no_rank_is_done_before_the_last_one_enters(name):
    machine = flat(33)
    start = np.random.default_rng(1).lognormal(-9, 1, 33)
    times = allreduce_times(AllreduceSpec(name), 1 << 20, machine, start)
    assert allreduce_times(AllreduceSpec(name), 1 << 20, machine, start + 5) == pytest.approx(
        times + 5
    )
    assert times.min() > start.max()
    later = start.copy()
    later[7] += 1e-3
    assert (allreduce_times(AllreduceSpec(name), 1 << 20, machine, later) >= times).all()
    assert start[7] < later[7]  # the argument is unchanged


def of_oracle(row):
    tree = {"leaf_size": 8, "oversubscription": 8 / row["uplinks"]} if row["uplinks"] else {}
    spec = Link(2 * ORACLE["latency_s"], ORACLE["bytes_per_s"])
    return Machine(
        nodes=row["ranks"], network=spec, spine_latency_s=2 * ORACLE["latency_s"], **tree
    )


def label(row):
    return "-".join(str(row[key]) for key in ("algorithm", "ranks", "uplinks", "bytes"))


@pytest.mark.parametrize("row", ORACLE["rows"], ids=label)
def test_simgrid_takes_as_long(row):
    seconds = allreduce_times(AllreduceSpec(row["algorithm"]), row["bytes"], of_oracle(row)).max()
    assert seconds == pytest.approx(row["seconds"], rel=0.1)


def test_over_subscription_slows_down_all_but_a_ring_in_order_of_the_nodes():
    def slowdown(rows):
        times = [
            allreduce_times(AllreduceSpec(row["algorithm"]), row["bytes"], of_oracle(row))
            for row in rows
        ]
        ours = [after.max() / before.max() for before, after in pairwise(times)]
        theirs = [after["seconds"] / before["seconds"] for before, after in pairwise(rows)]
        return ours, theirs

    found = defaultdict(list)
    for row in ORACLE["rows"]:
        if row["uplinks"] and row["bytes"] == 1 << 20:
            found[row["algorithm"]].append(row)
    for name in ("ring", "doubling", "halving"):
        rows = found[name]
        assert [row["uplinks"] for row in rows] == [8, 4, 1]
        ours, theirs = slowdown(rows)
        assert ours == pytest.approx(theirs, rel=0.1)
        assert (max(ours) < 1.03) == (name == "ring")


def test_ranks_of_a_node_share_its_network_adapters():
    def seconds(nics):
        machine = Machine(nodes=8, ranks_per_node=4, network=FLAT, nics=nics)
        return allreduce_times(AllreduceSpec("doubling"), 64 << 20, machine).max()

    across_s = (
        3 * (64 << 20) / BYTES_PER_S
    )  # in three of five rounds all four ranks send to another node
    assert seconds(1) - seconds(2) == pytest.approx(2 * across_s)
    assert seconds(2) - seconds(4) == pytest.approx(across_s)


def test_two_levels_are_the_node_s_memory_and_a_sum_on_each_rail():
    num_bytes = 8 << 20
    machine = Machine(
        nodes=16,
        ranks_per_node=4,
        network=FLAT,
        nics=2,
        node=Link(1e-6, 1),
        reduce_bytes_per_s=2e10,
    )
    part_s = (
        0.75 * num_bytes / 2e10
    )  # three quarters of a slice come from others; summed, then copied
    for rails, sharing in ((1, 1), (2, 1), (4, 2)):
        rail_s = (15 / 16) * num_bytes / rails * (2 * sharing / BYTES_PER_S + 1 / 2e10)
        times = allreduce_times(AllreduceSpec("halving", rails), num_bytes, machine)
        assert times == pytest.approx(2 * part_s + 3 * 2e-6 + 8 * LATENCY_S + rail_s)
    one_each = flat(16)
    times = [
        allreduce_times(AllreduceSpec("ring", rails), num_bytes, one_each) for rails in (0, 1)
    ]
    assert (times[0] == times[1]).all()


@pytest.mark.parametrize("codec", ["none", "bf16", "fp16", "int8:1:2e-10"])
@pytest.mark.parametrize("rails", [0, 1, 4])
@pytest.mark.parametrize("name", ["doubling", "halving", "tree", "ring"])
def test_costs_of_codecs_shared_cores_and_processors_equal_the_closed_form(name, rails, codec):
    machine = Machine(
        nodes=8,
        ranks_per_node=4,
        network=Link(1e-5, 1e9),
        ranks_per_core=2,
        reduce_bytes_per_s=5e9,
        handle_bytes_per_s=1.3e9,
    )
    spec = AllreduceSpec(name, rails, codec)
    output = allreduce(machine, 1 << 20, spec).seconds(machine)
    found = allreduce_times(spec, 1 << 20, machine).max()
    if (
        name == "ring" and not rails
    ):  # one rank of each node sends to another node, the others are earlier
        assert output / 2 < found < output
    else:
        assert found == pytest.approx(output)


def test_a_late_rank_holds_up_both_levels():
    machine = Machine(nodes=4, ranks_per_node=2, network=FLAT)
    start = np.zeros(8)
    on_time = allreduce_times(AllreduceSpec("ring", 2), 1 << 20, machine)
    start[5] = 1.0
    late = allreduce_times(AllreduceSpec("ring", 2), 1 << 20, machine, start)
    assert late.min() >= 1.0 + on_time.min() / 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_sixteen_thousand_ranks_are_simulated(name):
    machine = Machine(nodes=4096, ranks_per_node=4, network=FLAT)
    times = allreduce_times(AllreduceSpec(name, 2), 25 << 20, machine)
    assert len(times) == 16384
    assert times.max() < 0.2


def test_invalid_requests_raise():
    with pytest.raises(ConfigError, match="slices can only run on one node, got 4"):
        allreduce_times(AllreduceSpec("slices", 1), 10, flat(4))
    with pytest.raises(ConfigError, match="got 3 for 4 ranks"):
        allreduce_times(AllreduceSpec("ring"), 10, flat(4), np.zeros(3))
