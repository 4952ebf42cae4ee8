"""Check closed forms: equal to the messages of the algorithms, and never below lower bounds."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.ops import Op, combination
from hpctrain.comm.rail import algorithms
from hpctrain.core.errors import ConfigError
from hpctrain.cost.collectives import (
    AllreduceSpec,
    Load,
    allreduce,
    bound,
    fastest,
    parameter_server,
)
from hpctrain.cost.machine import Link, Machine
from hpctrain.cost.schedules import SCHEDULES
from hpctrain.cost.step import allreduce_times
from tests.comm.simulated import run_ranks

SEGMENT_BYTES = SCHEDULES["double_tree"].segment_bytes
NUMEL = 3 * 2**10
MIB = 2**20


def sent_by_each(name, size, numel=NUMEL):
    """Return the number of bytes and of messages that each rank sends in an algorithm."""

    def work(wire):
        algorithms.ALGORITHMS[name](wire, torch.ones(numel), combination(torch.float32, Op.SUM))

    _, wires = run_ranks(size, work, eager=True)
    return [(wire.num_bytes_sent, wire.num_messages) for wire in wires]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["ring", "doubling", "halving"])
def test_bytes_and_rounds_of_symmetric_schedules_equal_those_of_the_algorithm(name, size):
    load = allreduce(Machine(nodes=size), 4 * NUMEL, AllreduceSpec(name))
    assert set(sent_by_each(name, size)) == {(load.network_bytes, load.network_rounds)}
    assert load == allreduce(Machine(nodes=size), 4 * NUMEL, AllreduceSpec(name, rails=1))


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"double_tree"}))
def test_for_any_number_of_ranks_no_rank_sends_more_than_the_model_says(name, size):
    load = allreduce(Machine(nodes=size), 4 * NUMEL, AllreduceSpec(name))
    most = max(num_bytes for num_bytes, _ in sent_by_each(name, size))
    slack = 4 * size  # parts differ by an element
    # The path of a rank also carries messages of others: up to twice its own.
    assert most <= load.network_bytes + slack <= (3 if "tree" in name else 2) * most + slack


def test_a_rank_between_two_trees_waits_for_twice_what_it_sends_once_they_are_full():
    segments = 4000
    load = allreduce(Machine(nodes=12), segments * SEGMENT_BYTES, AllreduceSpec("double_tree"))
    assert load.network_bytes == pytest.approx(4 * segments * SEGMENT_BYTES, rel=0.01)
    assert max(num_bytes for num_bytes, _ in sent_by_each("double_tree", 12)) == 2 * 4 * NUMEL


@pytest.mark.parametrize(("numel", "size", "share"), [(1000, 8, 1.75), (1003, 8, 1.75)])
def test_each_rank_of_a_ring_sends_two_k_minus_one_over_k(numel, size, share):
    load = allreduce(Machine(nodes=size), 4 * numel, AllreduceSpec("ring"))
    assert load.network_bytes == pytest.approx(share * 4 * numel)
    sent = [num_bytes for num_bytes, _ in sent_by_each("ring", size, numel)]
    assert min(sent) <= load.network_bytes <= max(sent)
    assert (len(set(sent)) == 1) == (numel % size == 0)


def leaving_first_node(name, nodes, ranks):
    """Return the bytes that the first node sends to other nodes, divided by the message size."""
    total = 0

    def work(wire):
        nonlocal total
        start_send = wire.start_send

        def counted(tensor, dest, tag=0):
            nonlocal total
            if wire.rank < ranks <= dest:
                total += tensor.nbytes
            return start_send(tensor, dest, tag)

        wire.start_send = counted
        algorithms.ALGORITHMS[name](wire, torch.ones(NUMEL), combination(torch.float32, Op.SUM))

    run_ranks(nodes * ranks, work, eager=True)
    return total / (4 * NUMEL)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("name", ["ring", "doubling", "halving"])
def test_flat_ranks_share_the_network_adapter_of_their_node(name, nodes, ranks):
    machine = Machine(nodes=nodes, ranks_per_node=ranks)
    load = allreduce(machine, 1.0, AllreduceSpec(name))
    assert load.network_bytes == pytest.approx(leaving_first_node(name, nodes, ranks))
    two_cards = Machine(nodes=nodes, ranks_per_node=ranks, nics=2)
    shared = 1 if name == "ring" else 2  # a ring leaves a node once
    assert (
        allreduce(two_cards, 1.0, AllreduceSpec(name)).network_bytes == load.network_bytes / shared
    )


@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("rails", [0, 1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_time_is_below_the_bounds(name, rails, codec):
    ratio = 0.5 if codec == "bf16" else 1.0
    for nodes in (1, 2, 3, 4, 7, 8, 100, 1024):
        for nics in (1, 2):
            machine = Machine(nodes=nodes, ranks_per_node=4, nics=nics)
            load, least = (
                allreduce(machine, MIB, AllreduceSpec(name, rails, codec)),
                bound(machine, MIB),
            )
            rounds = load.network_rounds + load.node_rounds
            assert rounds >= least.network_rounds
            assert load.network_bytes >= ratio * least.network_bytes * (1 - 1e-12)


def test_two_levels_send_the_minimum_of_the_network():
    for nodes in (2, 4, 16):
        machine = Machine(nodes=nodes, ranks_per_node=8)
        load = allreduce(machine, MIB, AllreduceSpec("ring", rails=8))
        assert load.network_bytes == pytest.approx(bound(machine, MIB).network_bytes)


def test_rails_share_network_adapters_and_are_worthwhile_with_one_each():
    def sent(rails, nics):
        machine = Machine(nodes=4, ranks_per_node=4, nics=nics)
        return allreduce(machine, MIB, AllreduceSpec("ring", rails)).network_bytes

    assert sent(4, 1) == sent(1, 1)
    assert sent(4, 2) == sent(4, 1) / 2
    assert sent(1, 2) == sent(1, 1)


def test_oversubscription_slows_pairs_but_not_a_ring_in_order():
    def sent(name, times):
        machine = Machine(nodes=64, leaf_size=8, oversubscription=times)
        return allreduce(machine, MIB, AllreduceSpec(name)).network_bytes

    assert sent("ring", 8) == sent("ring", 1)
    # All nodes of a leaf exchange with others in the last three of six rounds.
    assert sent("doubling", 8) == (3 + 3 * 8) / 6 * sent("doubling", 1)
    assert sent("halving", 1) < sent("halving", 8) < sent("halving", 1) * 8


def test_bf16_sends_half_the_bytes_and_rounding_has_a_cost():
    machine = Machine(nodes=4, ranks_per_node=2, network=Link(0, 1e8), reduce_bytes_per_s=1e10)
    plain, half = (
        allreduce(machine, MIB, AllreduceSpec("ring", 2, codec)) for codec in ("none", "bf16")
    )
    assert half.network_bytes == plain.network_bytes / 2
    assert half.combined_bytes > plain.combined_bytes * 0.5
    assert half.seconds(machine) < plain.seconds(machine)
    slow = Machine(nodes=4, ranks_per_node=2, network=Link(0, 1e12), reduce_bytes_per_s=1e8)
    assert half.seconds(slow) > plain.seconds(slow)


def test_a_codec_is_its_bytes_and_its_seconds():
    machine = Machine(nodes=4, ranks_per_node=2)
    plain, none, int8 = (
        allreduce(machine, MIB, AllreduceSpec("ring", 2, codec))
        for codec in ("none", "mine:4:0", "int8:1:2e-10")
    )
    assert none == plain
    assert int8.network_bytes == plain.network_bytes / 4
    assert int8.codec_s == pytest.approx(MIB / 2 * 2e-10)  # on the part of its rail
    assert int8.seconds(replace(machine, network=Link(0, 1e30))) > int8.codec_s


def test_ranks_at_work_share_cores_and_those_that_wait_leave_them():
    def load(rails, ranks_per_core):
        machine = Machine(nodes=4, ranks_per_node=4, ranks_per_core=ranks_per_core)
        return allreduce(machine, MIB, AllreduceSpec("ring", rails))

    for rails in (1, 2, 4):
        alone, shared = load(rails, 1), load(rails, 4)
        assert shared.network_bytes == alone.network_bytes
        assert shared.handled_bytes == rails * alone.handled_bytes
        assert shared.network_rounds == rails * alone.network_rounds
        assert shared.node_rounds == 4 * alone.node_rounds
        assert load(rails, 0.5) == alone


def test_latency_decides_for_short_messages_and_bandwidth_for_long_ones():
    machine = Machine(nodes=64, network=Link(1e-6, 1e10), reduce_bytes_per_s=1e11)
    assert fastest(machine, 8).algorithm == "doubling"
    assert fastest(machine, 256 * 2**20).algorithm in ("halving", "ring")
    assert fastest(Machine(nodes=1, ranks_per_node=4), MIB) == AllreduceSpec("slices", 1)
    assert allreduce(Machine(nodes=1), MIB, AllreduceSpec("ring")) == Load()


def test_the_busiest_server_takes_from_all_ranks_and_a_large_tensor_cannot_be_shared_out():
    machine = Machine(nodes=32)
    few, many = (parameter_server(machine, 96.0, servers) for servers in (2, 32))
    assert (few.network_bytes, many.network_bytes) == (31 * 48, 31 * 3)
    assert parameter_server(machine, 96.0, 32, largest=8).network_bytes == 31 * 8
    with pytest.raises(ConfigError, match="between 1 and the 32 nodes, got 33"):
        parameter_server(machine, 96.0, 33)


def test_unknown_names_are_rejected():
    with pytest.raises(ConfigError, match=r"one of doubling, .*, got 'library'"):
        AllreduceSpec("library")
    with pytest.raises(ConfigError, match="got 'slices'"):
        AllreduceSpec("slices", rails=0)
    for codec in ("gzip", "int8:0:0", "int8:1:-1", "int8:one:1", "int8:nan:0"):
        with pytest.raises(ConfigError, match=f"one of none, fp16, bf16, or .*, got '{codec}'"):
            AllreduceSpec("ring", codec=codec)


def test_rounds_of_a_bound_are_a_logarithm():
    assert bound(Machine(nodes=1000), 1.0).network_rounds == math.ceil(math.log2(1000))
    assert bound(Machine(nodes=1, ranks_per_node=1), 1.0) == Load()


@pytest.mark.parametrize("nodes", [2, 3, 4, 6, 16, 33])
@pytest.mark.parametrize("name", SCHEDULES)
def test_closed_forms_equal_the_simulation_of_the_messages(name, nodes):
    machine = Machine(nodes=nodes, network=Link(1e-5, 1e9))
    for num_bytes in (64 << 10, 1 << 20, 16 << 20):
        ratio = (
            allreduce(machine, num_bytes, AllreduceSpec(name)).seconds(machine)
            / allreduce_times(AllreduceSpec(name), num_bytes, machine).max()
        )
        assert 0.99 < ratio < 1.05


@settings(max_examples=60)
@given(data=st.data())
def test_the_closed_form_of_a_double_tree_is_within_a_tenth_of_the_simulation(data):
    nodes = int(2 ** data.draw(st.floats(1, 14)))
    ranks_per_node, nics = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(2))
    spec = AllreduceSpec("double_tree", rails=data.draw(st.integers(1, ranks_per_node)))
    network = Link(10 ** data.draw(st.floats(-7, -4)), 10 ** data.draw(st.floats(8, 11)))
    machine = Machine(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        nics=nics,
        network=network,
        reduce_bytes_per_s=network.bytes_per_s * 10 ** data.draw(st.floats(-0.3, 2)),
    )
    # The simulation of many segments and ranks takes seconds.
    num_bytes = int(10 ** data.draw(st.floats(0.6, 8 if nodes < 1000 else 6)))
    simulated_s = allreduce_times(spec, num_bytes, machine).max()
    closed_s = allreduce(machine, num_bytes, spec).seconds(machine)
    assert closed_s == pytest.approx(simulated_s, rel=0.1)


def test_the_closed_form_of_a_double_tree_holds_for_short_messages_on_many_nodes():
    machine = Machine(nodes=16_384)
    spec = AllreduceSpec("double_tree")
    simulated_s = allreduce_times(spec, 400, machine).max()
    assert allreduce(machine, 400, spec).seconds(machine) == pytest.approx(simulated_s, rel=0.01)
