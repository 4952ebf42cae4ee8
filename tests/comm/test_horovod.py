"""Laws of the engine ``horovod`` beside those of all communicators: what it is given, and when."""

import json
from collections.abc import Generator
from dataclasses import replace
from functools import partial

import pytest
import torch

from hpctrain.comm.engines import horovod_session
from hpctrain.comm.engines.horovod import HorovodCommunicator
from hpctrain.comm.engines.horovod_session import library
from hpctrain.comm.factory import connect
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.ops import Op
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.plan.plan_file import StoredPlan
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, ConfigError, LaunchError
from tests.comm.conftest import close

pytestmark = pytest.mark.requires("horovod")

HOROVOD = Settings(probe="off", engine="horovod")

OPERATIONS = ("allreduce_async_", "allgather_async", "broadcast_async_", "reducescatter_async")
"""Horovod's functions that are used."""


@pytest.fixture
def comm() -> Generator[HorovodCommunicator]:
    """Connect by Horovod, flat."""
    made = connect(find_world(), HOROVOD)
    yield made.comm
    close(made)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which operations of Horovod's are used."""
    found = library().torch
    noted: list[str] = []
    for name in OPERATIONS:
        monkeypatch.setattr(found, name, partial(_noted, noted, name, getattr(found, name)))
    return noted


def _noted(noted, operation, function, *args, **options):
    noted.append(operation)
    return function(*args, **options)


@pytest.mark.ranks(2, 3)
def test_horovod_does_what_it_can(calls):
    made = connect(find_world(), HOROVOD)
    comm = made.comm
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint32):
        comm.allreduce_(torch.ones(5, dtype=dtype))
    comm.allreduce_(torch.ones(5, dtype=torch.bool), op=Op.BAND)
    comm.allreduce_(torch.ones(5, dtype=torch.int16), op=Op.MAX)
    assert calls == ["allreduce_async_"] * 7
    calls.clear()
    comm.reduce_scatter(torch.ones(7))
    comm.all_gather(torch.ones(comm.rank + 1, dtype=torch.bfloat16))
    comm.alltoall([torch.ones(3, dtype=torch.complex128)] * comm.size)
    comm.broadcast_(torch.ones(3, dtype=torch.bool), comm.size - 1)
    assert calls == list(OPERATIONS[1:])
    close(made)


@pytest.mark.ranks(2, 3)
def test_what_horovod_would_do_in_another_way_goes_over_mpi(world, calls):
    made = connect(find_world(), HOROVOD)
    comm = made.comm
    smallest = torch.tensor([float("nan") if world.rank else 1.0])
    comm.allreduce_(smallest, op=Op.MIN)  # MPI's minimum of NaN and 1 is 1
    assert bool(smallest.isnan())
    largest = torch.tensor([0xFFFF if world.rank else 1], dtype=torch.uint16)
    comm.allreduce_(largest, op=Op.MAX)
    assert largest.item() == 0xFFFF
    comm.allreduce_(torch.ones(2, dtype=torch.int32), op=Op.BXOR)
    comm.reduce_scatter(torch.ones(5), numels=[5] + [0] * (world.size - 1))
    comm.all_gather(torch.ones(0))
    assert calls == []
    close(made)


@pytest.mark.ranks(2, 3, 4)
def test_a_group_is_a_process_set_and_groups_of_the_same_ranks_share_it(world, comm):
    session = comm._session
    ranks = [1, 0]  # Horovod has them sorted
    first, second = comm.group(ranks), comm.group(ranks)
    assert len(session._sets) == (1 if world.size > 2 else 0)
    if first is not None:
        assert isinstance(first, HorovodCommunicator)
        assert first.rank == 1 - world.rank
        gathered = first.all_gather(torch.full((first.rank + 1,), float(world.rank)))
        assert [tensor.tolist() for tensor in gathered] == [[1.0], [0.0, 0.0]]
        value = torch.tensor([world.rank])
        second.broadcast_(value, root=0)
        assert value.item() == 1
        received = second.alltoall([torch.tensor([10 * world.rank + i]) for i in range(2)])
        assert [one.item() for one in received] == [10 + second.rank, second.rank]
        assert first.reduce_scatter(torch.tensor([1, 2, 3])).tolist() == (
            [2, 4] if first.rank == 0 else [6]
        )
        inner = first.group([0, 1])  # the same ranks: the same process set
        assert isinstance(inner, HorovodCommunicator)
        inner.close()
        first.close()
        second.close()
    everyone = comm.group(range(world.size))
    assert everyone.allreduce(torch.ones(1)).item() == world.size
    everyone.close()
    another = comm.group(range(1, world.size))
    assert len(session._sets) == (2 if world.size > 2 else 0)
    if another is not None:
        another.close()


@pytest.mark.ranks(4)
def test_groups_of_groups_go_over_mpi(world, comm):
    most = comm.group([1, 2, 3])
    if most is not None:
        pair = most.group([1, 0])
        if pair is not None:
            assert type(pair) is MpiCommunicator
            total = torch.tensor([world.rank])
            pair.allreduce_(total)
            assert total.item() == 3
            pair.close()
        most.close()
    comm.barrier()


@pytest.mark.ranks(4)
def test_two_levels_take_three_operations_and_give_the_same(calls):
    two = replace(HOROVOD, ranks_per_node=2, horovod_way="two-level")
    made = connect(find_world(), two)
    assert made.plan.tensors == SizeTable(((0, "two-level"),))
    value = torch.full((5,), made.comm.rank, dtype=torch.float64)
    made.comm.allreduce_(value, scale=0.5)
    assert value.tolist() == [3.0] * 5
    assert calls == ["reducescatter_async", "allreduce_async_", "allgather_async"]
    calls.clear()
    made.comm.allreduce_(torch.ones(1))  # too small to be cut
    made.comm.allreduce_(torch.ones(5, dtype=torch.int32), op=Op.MAX)
    assert calls == ["allreduce_async_"] * 2
    close(made)


@pytest.mark.ranks(4)
def test_the_probe_chooses_between_flat_and_two_levels():
    settings = replace(HOROVOD, probe="auto", ranks_per_node=2)
    made = connect(find_world(), settings)
    assert made.plan_origin == "measurement"
    assert {one.algorithm for one in made.plan.measured} == {"flat", "two-level"}
    assert {way for _, way in made.plan.tensors.steps} <= {"flat", "two-level"}
    assert made.comm.allreduce(torch.ones(9)).tolist() == [4.0] * 9
    close(made)
    again = connect(find_world(), settings)
    assert again.plan_origin == "a measurement in an earlier run"
    assert again.plan == made.plan
    close(again)


@pytest.mark.ranks(2, 3)
def test_two_levels_that_cannot_be_are_flat_and_it_is_said():
    made = connect(find_world(), replace(HOROVOD, horovod_way="two-level"))
    assert made.plan.tensors == SizeTable(((0, "flat"),))
    assert any("two levels of Horovod need several nodes" in note for note in made.notes)
    close(made)


@pytest.mark.ranks(2, 3)
def test_worlds_come_one_after_the_other_with_any_ranks(world):
    for _ in range(2):
        made = connect(world.Split(0, -world.rank), HOROVOD)  # backwards
        value = torch.tensor([world.rank])
        made.comm.broadcast_(value, root=0)
        assert value.item() == world.size - 1
        close(made)
    assert not library().torch.is_initialized()


@pytest.mark.ranks(2, 3)
def test_one_world_at_a_time_unless_it_has_the_same_ranks(world, comm):
    twin = connect(find_world(), HOROVOD)
    assert twin.comm._session is comm._session
    with pytest.raises(LaunchError, match="serves one world at a time"):
        connect(world.Split(0, -world.rank), HOROVOD)
    close(twin)
    assert comm.allreduce(torch.ones(1)).item() == world.size


@pytest.mark.ranks(2, 3)
def test_a_rank_without_horovod_is_an_error_on_every_rank(world, monkeypatch):
    def missing():
        raise LaunchError("Horovod is not installed; `hpctrain horovod build`")

    if world.rank == 1:
        monkeypatch.setattr(horovod_session, "library", missing)
    with pytest.raises(LaunchError, match="rank 1: Horovod is not installed; `hpctrain horovod"):
        connect(find_world(), HOROVOD)


@pytest.mark.ranks(2)
def test_an_error_inside_horovod_is_ours(comm):
    library().torch.shutdown()
    with pytest.raises(CommError, match=r"Horovod 0\.\d+\.\d+ could not .*not been initialized"):
        comm.allreduce_(torch.ones(1))


@pytest.mark.ranks(2)
def test_horovods_variables_are_left_alone_and_ours_come_first(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
    monkeypatch.setenv("HOROVOD_TIMELINE", "a.json")
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    found = horovod_session.variables_for(Settings.from_env())
    assert found["HOROVOD_FUSION_THRESHOLD"] == "1024"
    assert found["HOROVOD_TIMELINE"] is None
    assert "HOROVOD_CYCLE_TIME" not in found
    ours = replace(HOROVOD, fusion_bytes=0, cycle_s=0.0005)
    found = horovod_session.variables_for(ours)
    assert found["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert found["HOROVOD_CYCLE_TIME"] == "0.5"


@pytest.mark.ranks(2)
def test_a_plan_of_another_engine_is_refused(tmp_path_factory, world):
    made = connect(find_world(), HOROVOD)
    path = world.bcast(tmp_path_factory.mktemp("plans") / "plan.json")
    if world.rank == 0:
        path.write_text(json.dumps(StoredPlan.of(made.topology, made.plan).as_dict()))
    close(made)
    world.Barrier()
    pinned = connect(find_world(), replace(HOROVOD, plan=path))
    assert pinned.plan == made.plan
    close(pinned)
    with pytest.raises(ConfigError, match="engine horovod, and HPCTRAIN_ENGINE is hpctrain"):
        connect(find_world(), Settings(probe="off", plan=path))
