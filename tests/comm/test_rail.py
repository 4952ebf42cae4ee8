"""Check that a rail uses the algorithm in its table, for whole parts and concurrent chunks."""

import random
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from hpctrain.comm import requests
from hpctrain.comm.ops import Op, combination
from hpctrain.comm.plan.choice import STEP_BYTES, rail_rule
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.rail import rail as rail_module
from hpctrain.comm.rail.algorithms import ALGORITHMS
from hpctrain.comm.rail.rail import DEPTH, InFlight, MpiWire, Rail
from hpctrain.comm.waiting import BY_MPI, SLEEP_SHARE, Watch, wait_until
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.core.units import KIB, MIB
from hpctrain.cost.schedules import SCHEDULES
from tests.comm import fuzz_values as fv
from tests.comm.conftest import PATHS, SAME, connected
from tests.comm.fuzz import Case, Checker, compare, fuzz
from tests.comm.test_algorithms import random_numbers, raw
from tests.harness.pace import scaled

SUM = combination(torch.float32, Op.SUM)


@pytest.fixture
def make_rail(world):
    """Make rails over all ranks, and close them afterwards."""
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


@pytest.mark.ranks(2, 3, 4)
def test_an_all_to_all_sends_only_tensors_that_have_elements(make_rail, monkeypatch):
    rail, dests = make_rail(), []
    start_send = rail.wire.start_send
    monkeypatch.setattr(
        rail.wire,
        "start_send",
        lambda tensor, dest: dests.append(dest) or start_send(tensor, dest),
    )
    numels = [[(5 * a + 3 * b) % 3 for b in range(rail.size)] for a in range(rail.size)]
    given = [torch.full((numel,), float(rail.rank)) for numel in numels[rail.rank]]
    arrived = rail.start_alltoall(given, [row[rail.rank] for row in numels])()
    assert [each.tolist() for each in arrived] == [
        [float(rank)] * row[rail.rank] for rank, row in enumerate(numels)
    ]
    others = (rail.rank + step for step in range(1, rail.size))
    full = [rank % rail.size for rank in others if numels[rail.rank][rank % rail.size]]
    assert dests == full


@pytest.mark.ranks(1)
def test_waits_of_a_long_reduction_sleep_from_the_start():
    tries = 0

    def done():
        nonlocal tries
        tries += 1

    with InFlight(None, SUM, Watch()) as in_flight:
        assert in_flight.pace().yield_s == BY_MPI.yield_s
        time.sleep(0.02)
        wait_until(done, lambda _: None, in_flight.pace(), timeout_s=0.01)
    assert 1 <= tries <= 0.01 / (0.02 * SLEEP_SHARE) + 1


@pytest.mark.ranks(1)
def test_rail_of_one_rank_sends_nothing(make_rail):
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
@pytest.mark.parametrize(("name", "chunk_bytes"), [("ring", 0), ("ring", 256), ("library", 0)])
def test_wait_for_a_late_rank_uses_little_cpu_time(world, make_rail, name, chunk_bytes):
    watch = Watch()
    rail = make_rail((0, name), watch=watch, chunk_bytes=chunk_bytes)
    world.Barrier()
    used_s = time.process_time()
    if world.rank == 0:
        time.sleep(1.2)
    rail.reduce_(torch.ones(1000), SUM)
    if world.rank == 1:
        assert watch.waited_s > 0.8
        assert time.process_time() - used_s < scaled(0.3) * watch.waited_s


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["doubling", "library"])
def test_wait_for_a_missing_rank_raises_with_the_name_of_the_rail(world, make_rail, name):
    watch = Watch(hosts={4: "n4", 7: "n7"}, rank=4 + 3 * world.rank, timeout_s=0.3)
    rail = make_rail(watch=watch, name="rail 3", world_ranks=[4, 7])
    whom = "the other ranks" if name == "library" else "rank 4 on n4"
    part = torch.ones(1_000_000)
    if world.rank == 1:
        with pytest.raises(RankLostError, match=f"rank 7 on n7 .* for {whom} over rail 3; check"):
            rail.allreduce_by(name, part, SUM)
    world.Barrier()
    if world.rank == 0:  # complete the operations that the other rank began
        # The library may need the core of rank 1, which has given up, to send large pieces.
        with suppress(RankLostError) if name == "library" else pytest.raises(RankLostError):
            rail.allreduce_by(name, part, SUM)


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 7, 8, 13, 64, 1000])
def test_rule_selects_doubling_for_small_parts_and_ring_for_large_ones(num_nodes):
    table = rail_rule(num_nodes)
    assert {name for _, name in table.steps} <= set(ALGORITHMS)
    assert table.at(4) == table.at(16 * KIB) == "doubling"
    assert table.at(num_nodes * STEP_BYTES) == table.at(1 << 40) == "ring"


def test_rule_selects_halving_for_middle_sizes_on_powers_of_two_or_many_nodes():
    by_nodes = {num_nodes: rail_rule(num_nodes).at(100 * KIB) for num_nodes in (3, 4, 6, 8, 9)}
    assert by_nodes == {3: "ring", 4: "halving", 6: "ring", 8: "halving", 9: "halving"}
    assert rail_rule(1000).at(10 * MIB) == "halving"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("numel", "sends"), [(5, "20 B"), (50, "more")])
def test_message_of_another_size_raises_with_both_ranks(world, numel, sends):
    wire = MpiWire(world)
    if wire.rank == 0:
        with pytest.raises(CommError, match=f"rank 0 expects 40 B and rank 1 sends {sends}"):
            wire.receive_(torch.empty(10), 1)
    else:
        wire.send(torch.ones(numel), 0)


# Chunks

CHUNK_BYTES = 256
BETWEEN_NODES = ("nodes of one", "nodes of two")


@pytest.fixture(params=[name for name in BETWEEN_NODES if name not in SAME])
def chunked(request):
    """Connect ranks of several nodes, whose rails use chunks of a few elements."""
    with connected(PATHS[request.param]) as made:
        made.comm.use(replace(made.comm.plan, chunk_bytes=CHUNK_BYTES))
        yield made.comm


def drawn(number):
    """Draw a reduction of at most a few hundred chunks."""
    source = random.Random(number)
    dtype = source.choice(fv.DTYPES)
    may_scale = dtype.is_floating_point or dtype.is_complex
    return Case(
        number=number,
        kind=source.choice(("allreduce_", "bucket")),
        draw=fv.Draw((7, number), dtype, specials=source.random() < 0.1),
        op=source.choice(fv.ops_of(dtype)),
        scale=source.choice((None, 1 / 3)) if may_scale else None,
        shape=(source.randrange(CHUNK_BYTES * source.choice((1, 4, 64))),),
        layout=source.choice(fv.LAYOUTS),
        luck=source.random(),
    )


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.limit(120)
def test_random_reductions_in_chunks_equal_numpy_and_have_the_same_bits(world, chunked, jitter):
    checker, checksums = Checker(chunked), {}
    for turn, number in enumerate(range(world.size - 2, 120, 3)):  # one world size each
        if turn == 13:
            jitter()
        case = drawn(number)
        try:
            checksums[number] = checker.carry_out(case)
        except Exception as error:
            raise AssertionError(f"{case} on rank {world.rank}: {error}") from error
    compare(chunked.allgather_object(checksums))
    fuzz(chunked, 50, seed=world.size)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_are_bitwise_equal_to_separate_reductions(world, make_rail, name, dtype):
    how = combination(dtype, Op.SUM)
    numel = 40 * CHUNK_BYTES // dtype.itemsize + 17
    part = random_numbers(world.rank, numel, dtype)
    alone = part.clone()
    rail = make_rail((0, name), chunk_bytes=CHUNK_BYTES)
    rail.reduce_(part, how)
    for chunk in alone.split(CHUNK_BYTES // dtype.itemsize):
        rail.allreduce_by(name, chunk, how)
    assert raw(part) == raw(alone)
    assert len(set(world.allgather(raw(part)))) == 1


@pytest.mark.ranks(2, 3)
def test_chunks_are_returned_in_order_while_the_next_are_in_flight(make_rail):
    begun, over = [], []

    def parts():
        for number in range(3 * DEPTH):
            begun.append(number)
            yield torch.full((100,), float(number))

    with InFlight(make_rail((0, "ring")), SUM, Watch()) as in_flight:
        for _ in in_flight.reduced(parts()):
            over.append(len(over))
            assert len(begun) == min(len(over) + DEPTH, 3 * DEPTH)
    assert over == begun


@pytest.mark.ranks(2)
def test_missing_rank_ends_all_operations_in_flight(world, make_rail):
    watch = Watch(hosts={0: "n0", 1: "n1"}, rank=world.rank, timeout_s=0.3)
    rail = make_rail((0, "ring"), chunk_bytes=CHUNK_BYTES, watch=watch, name="rail 3")
    part = torch.ones(100 * CHUNK_BYTES)
    if world.rank == 1:
        with pytest.raises(RankLostError, match=r"rank 1 on n1 .* for rank 0 on n0 over rail 3"):
            rail.reduce_(part, SUM)
        with pytest.raises(CommError, match="no longer in step"):
            watch.require_in_step()
        assert len(requests.pending(rail.wire._comm)) == DEPTH + 1  # sends keep memory
    world.Barrier()
    if world.rank == 0:  # complete the operations that the other rank began
        with pytest.raises(RankLostError):
            rail.reduce_(part, SUM)


@pytest.mark.ranks(2)
def test_error_between_two_chunks_fails_later_calls(chunked, monkeypatch):
    def break_down(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(chunked.node, "publish_chunk", break_down)
    bucket = chunked.new_bucket(100 * CHUNK_BYTES, torch.float32)
    with pytest.raises(ZeroDivisionError):
        chunked.allreduce_(bucket)
    with pytest.raises(CommError, match="no longer in step"):
        chunked.allreduce_(bucket)
