"""A rail: the algorithm that its table names, or the one that is asked for."""

import time

import pytest
import torch

from hpctrain.comm.ops import Op, combination
from hpctrain.comm.plan.choice import STEP_BYTES, rail_rule
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.rail import rail as rail_module
from hpctrain.comm.rail.algorithms import ALGORITHMS
from hpctrain.comm.rail.rail import MpiWire, Rail
from hpctrain.comm.waiting import Watch
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.core.units import KIB, MIB

SUM = combination(torch.float32, Op.SUM)


@pytest.fixture
def make_rail(world):
    """Make rails over all ranks, which are closed afterwards."""
    made = []

    def make(*steps, **more):
        made.append(Rail(world.Dup(), table=SizeTable(steps or ((0, "doubling"),)), **more))
        return made[-1]

    yield make
    for rail in made:
        rail.close()


@pytest.mark.ranks(2, 3, 4)
def test_the_table_chooses_by_the_bytes_of_the_part(make_rail, monkeypatch):
    called = []
    for name in ("doubling", "ring"):
        monkeypatch.setitem(ALGORITHMS, name, lambda *_, name=name: called.append(name))
    rail = make_rail((0, "doubling"), (4000, "ring"))
    rail.reduce_(torch.ones(999), SUM)
    rail.reduce_(torch.ones(1000), SUM)
    rail.reduce_(torch.ones(1000, dtype=torch.bfloat16), combination(torch.bfloat16, Op.SUM))
    assert called == ["doubling", "ring", "doubling"]


@pytest.mark.ranks(1)
def test_a_rail_of_one_moves_nothing(make_rail):
    rail = make_rail((0, "library"))
    part = torch.ones(1000)
    for name in ALGORITHMS:
        rail.allreduce_by(name, part, SUM)
    assert rail.traffic().rail_bytes == 0
    assert bool((part == 1).all())


@pytest.mark.ranks(2, 3, 4)
def test_bytes_of_messages_and_of_the_library_are_counted(world, make_rail):
    rail = make_rail()
    rail.allreduce_by("ring", torch.ones(1200), SUM)
    ring_bytes = 2 * (world.size - 1) * 4800 // world.size
    assert rail.traffic().rail_bytes == ring_bytes
    rail.allreduce_by("library", torch.ones(1200), SUM)
    assert rail.traffic().rail_bytes == ring_bytes + 4800


@pytest.mark.ranks(2, 3, 4)
def test_the_library_gets_long_parts_in_chunks(world, make_rail, monkeypatch):
    monkeypatch.setattr(rail_module, "CHUNK_ELEMENTS", 100)
    part = torch.arange(1003.0) * (world.rank + 1)
    make_rail().allreduce_by("library", part, SUM)
    assert torch.equal(part, torch.arange(1003.0) * sum(range(1, world.size + 1)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ring", "library"])
def test_a_late_rank_is_waited_for_asleep(world, make_rail, name):
    watch = Watch()
    rail = make_rail(watch=watch)
    world.Barrier()
    used_s = time.process_time()
    if world.rank == 0:
        time.sleep(1.5)
    rail.allreduce_by(name, torch.ones(1000), SUM)
    if world.rank == 1:
        assert watch.waited_s > 1
        assert time.process_time() - used_s < 0.3 * watch.waited_s


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["doubling", "library"])
def test_a_rank_that_does_not_come_ends_the_wait_with_the_rail_s_name(world, make_rail, name):
    watch = Watch(hosts={4: "n4", 7: "n7"}, rank=4 + 3 * world.rank, timeout_s=0.3)
    rail = make_rail(watch=watch, name="rail 3", world_ranks=[4, 7])
    whom = "the other ranks" if name == "library" else "rank 4 on n4"
    part = torch.ones(1_000_000)
    if world.rank == 1:
        with pytest.raises(RankLostError, match=f"rank 7 on n7 .* for {whom} over rail 3, longer"):
            rail.allreduce_by(name, part, SUM)
    world.Barrier()
    if world.rank == 0:  # meet what the other one began
        if name == "library":
            rail._comm.Ibarrier().Wait()
        else:
            rail.allreduce_by(name, part, SUM)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 7, 8, 13, 64, 1000])
def test_by_rule_small_parts_take_few_rounds_and_large_ones_a_ring(num_nodes):
    table = rail_rule(num_nodes)
    assert {name for _, name in table.steps} <= set(ALGORITHMS)
    assert table.at(4) == table.at(16 * KIB) == "doubling"
    assert table.at(num_nodes * STEP_BYTES) == table.at(1 << 40) == "ring"


def test_by_rule_middle_sizes_are_halved_where_nothing_must_be_folded_or_a_ring_is_long():
    by_nodes = {num_nodes: rail_rule(num_nodes).at(100 * KIB) for num_nodes in (3, 4, 6, 8, 9)}
    assert by_nodes == {3: "ring", 4: "halving", 6: "ring", 8: "halving", 9: "halving"}
    assert rail_rule(1000).at(10 * MIB) == "halving"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("numel", "sends"), [(5, "20 B"), (50, "more")])
def test_a_message_of_another_size_is_an_error_that_names_both_ends(world, numel, sends):
    wire = MpiWire(world)
    if wire.rank == 0:
        with pytest.raises(CommError, match=f"rank 0 takes 40 B and rank 1 sends {sends}"):
            wire.receive_(torch.empty(10), 1)
    else:
        wire.send(torch.ones(numel), 0)
