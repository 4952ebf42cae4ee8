"""Parts in chunks, several of which travel at once: the same sums, and no call after a failure."""

import random
import time
from dataclasses import replace

import pytest
import torch

from hpctrain.comm.factory import connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.ops import Op, combination
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.rail.in_flight import DEPTH, InFlight
from hpctrain.comm.rail.rail import Rail
from hpctrain.comm.waiting import Watch
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.cost.schedules import SCHEDULES
from tests.comm import fuzz_values as fv
from tests.comm.conftest import PATHS, SAME, close
from tests.comm.fuzz import Case, Checker, compare, fuzz
from tests.comm.test_algorithms import random_numbers, raw

SUM = combination(torch.float32, Op.SUM)
CHUNK_BYTES = 256
BETWEEN_NODES = ("nodes of one", "nodes of two")


@pytest.fixture(params=[name for name in BETWEEN_NODES if name not in SAME])
def chunked(request):
    """Connect ranks of several nodes, whose rails carry chunks of a few elements."""
    made = connect(find_world(), PATHS[request.param])
    made.comm.levels.use(replace(made.comm.levels.plan, chunk_bytes=CHUNK_BYTES))
    yield made.comm
    close(made)


@pytest.fixture
def make_rail(world):
    """Make rails over all ranks, which are closed afterwards."""
    made = []

    def make(algorithm, **more):
        made.append(Rail(world.Dup(), table=SizeTable(((0, algorithm),)), **more))
        return made[-1]

    yield make
    for rail in made:
        rail.close()


def drawn(number):
    """Draw a reduction of up to some hundred chunks."""
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
    for number in range(120):
        if number == 40:
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
def test_each_chunk_has_the_bits_that_it_has_alone(world, make_rail, name, dtype):
    how = combination(dtype, Op.SUM)
    numel = 40 * CHUNK_BYTES // dtype.itemsize + 17
    part = random_numbers(world.rank, numel, dtype)
    alone = part.clone()
    rail = make_rail(name, chunk_bytes=CHUNK_BYTES)
    rail.reduce_(part, how)
    for chunk in alone.split(CHUNK_BYTES // dtype.itemsize):
        rail.allreduce_by(name, chunk, how)
    assert raw(part) == raw(alone)
    assert len(set(world.allgather(raw(part)))) == 1


@pytest.mark.ranks(2, 3)
def test_chunks_are_handed_out_in_order_while_the_next_are_under_way(make_rail):
    begun, over = [], []

    def parts():
        for number in range(3 * DEPTH):
            begun.append(number)
            yield torch.full((100,), float(number))

    with InFlight(make_rail("ring"), SUM, Watch()) as in_flight:
        for _ in in_flight.reduced(parts()):
            over.append(len(over))
            assert len(begun) == min(len(over) + DEPTH, 3 * DEPTH)
    assert over == begun


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_ends_all_that_is_under_way(world, make_rail):
    watch = Watch(hosts={0: "n0", 1: "n1"}, rank=world.rank, timeout_s=0.3)
    rail = make_rail("ring", chunk_bytes=CHUNK_BYTES, watch=watch, name="rail 3")
    part = torch.ones(100 * CHUNK_BYTES)
    if world.rank == 1:
        with pytest.raises(RankLostError, match=r"rank 1 on n1 .* for rank 0 on n0 over rail 3"):
            rail.reduce_(part, SUM)
        with pytest.raises(CommError, match="a wait of this communicator has failed"):
            watch.require_in_step()
        assert len(rail.wire._under_way) == 2 * (DEPTH + 1)  # their memory stays
    world.Barrier()
    if world.rank == 0:  # meet what the other one began, as far as it came
        with pytest.raises(RankLostError):
            rail.reduce_(part, SUM)


@pytest.mark.ranks(2)
def test_after_an_error_between_two_chunks_nothing_goes_on(chunked, monkeypatch):
    def break_down(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(chunked.node, "publish_chunk", break_down)
    bucket = chunked.new_bucket(100 * CHUNK_BYTES, torch.float32)
    with pytest.raises(ZeroDivisionError):
        chunked.allreduce_(bucket)
    with pytest.raises(CommError, match="no longer in step"):
        chunked.allreduce_(bucket)


@pytest.mark.ranks(2)
def test_who_waits_for_a_late_rank_in_flight_leaves_its_core(world, make_rail):
    watch = Watch()
    rail = make_rail("ring", chunk_bytes=CHUNK_BYTES, watch=watch)
    world.Barrier()
    used_s = time.process_time()
    if world.rank == 0:
        time.sleep(1.0)
    rail.reduce_(torch.ones(1000), SUM)
    if world.rank == 1:
        assert watch.waited_s > 0.7
        assert time.process_time() - used_s < 0.3 * watch.waited_s
