"""Check what only the engine ``horovod`` does: its calls of Horovod, and their order."""

import json
from collections.abc import Generator
from dataclasses import replace
from functools import partial

import pytest
import torch

from hpctrain.comm import horovod_engine
from hpctrain.comm.factory import connect
from hpctrain.comm.horovod_engine import HorovodCommunicator, library
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.ops import Op
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.plan.planning import StoredPlan
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, ConfigError, LaunchError
from tests.comm.conftest import close, connected

pytestmark = pytest.mark.requires("horovod")

HOROVOD = Settings(probe="off", engine="horovod")

OPERATIONS = ("allreduce_async_", "allgather_async", "reducescatter_async")
"""Horovod's functions that are used."""


@pytest.fixture
def comm() -> Generator[HorovodCommunicator]:
    """Connect with Horovod, flat."""
    with connected(HOROVOD) as made:
        yield made.comm


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the operations of Horovod that are called."""
    found = library().torch
    noted: list[str] = []
    for name in OPERATIONS:
        monkeypatch.setattr(found, name, partial(_noted, noted, name, getattr(found, name)))
    return noted


def _noted(noted, operation, function, *args, **options):
    noted.append(operation)
    return function(*args, **options)


@pytest.mark.ranks(2, 3)
def test_supported_operations_use_horovod(comm, calls):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint32):
        comm.allreduce_(torch.ones(5, dtype=dtype))
    comm.allreduce_(torch.ones(5, dtype=torch.bool), op=Op.BAND)
    comm.allreduce_(torch.ones(5, dtype=torch.int16), op=Op.MAX)
    assert calls == ["allreduce_async_"] * 7


@pytest.mark.ranks(2, 3)
def test_operations_with_other_results_in_horovod_use_mpi(world, comm, calls):
    smallest = torch.tensor([float("nan") if world.rank else 1.0])
    comm.allreduce_(smallest, op=Op.MIN)  # MPI's minimum of NaN and 1 is 1
    assert bool(smallest.isnan())
    largest = torch.tensor([0xFFFF if world.rank else 1], dtype=torch.uint16)
    comm.allreduce_(largest, op=Op.MAX)
    assert largest.item() == 0xFFFF
    comm.allreduce_(torch.ones(2, dtype=torch.int32), op=Op.BXOR)
    comm.reduce_scatter(torch.ones(5))
    comm.all_gather(torch.ones(3))
    comm.broadcast_(torch.ones(3))
    assert calls == []


@pytest.mark.ranks(3, 4)
def test_groups_of_all_ranks_use_horovod_and_other_groups_use_mpi(world, comm):
    backwards = comm.group(range(world.size)[::-1])
    assert isinstance(backwards, HorovodCommunicator)
    last = world.size - 1
    assert backwards.allreduce(torch.tensor([world.rank])).item() == sum(range(world.size))
    inner = backwards.group([0, 1])
    assert (inner is None) == (world.rank < last - 1)
    if inner is not None:
        assert type(inner) is MpiCommunicator
        assert inner.allreduce(torch.tensor([world.rank])).item() == 2 * last - 1
        inner.close()
    backwards.close()


@pytest.mark.ranks(4)
def test_two_levels_use_three_operations_and_give_the_same_result(calls):
    with connected(replace(HOROVOD, ranks_per_node=2)) as made:
        assert made.plan.tensors == SizeTable(((0, "two-level"),))
        value = torch.full((5,), made.comm.rank, dtype=torch.float64)
        made.comm.allreduce_(value, scale=0.5)
        assert value.tolist() == [3.0] * 5
        assert calls == ["reducescatter_async", "allreduce_async_", "allgather_async"]
        calls.clear()
        made.comm.allreduce_(torch.ones(1))  # too small to be split
        made.comm.allreduce_(torch.ones(5, dtype=torch.int32), op=Op.MAX)
        assert calls == ["allreduce_async_"] * 2


@pytest.mark.ranks(2, 3)
def test_sums_of_one_node_and_of_nodes_of_one_rank_are_flat():
    for ranks_per_node in (None, 1):
        with connected(replace(HOROVOD, ranks_per_node=ranks_per_node)) as made:
            assert made.plan.tensors == SizeTable(((0, "flat"),))
            assert not made.plan.measured


@pytest.mark.ranks(4)
def test_flat_and_two_level_sums_are_measured_and_each_is_used_at_its_sizes(calls):
    with connected(replace(HOROVOD, ranks_per_node=2, probe="fresh")) as made:
        measured = {(each.num_bytes, each.algorithm) for each in made.plan.measured}
        assert {algorithm for _, algorithm in measured} == {"flat", "two-level"}
        assert made.comm.sums.table == made.plan.tensors
        made.comm.sums.table = SizeTable(((0, "flat"), (1024, "two-level")))
        for numel, num_calls in ((255, 1), (256, 3)):
            calls.clear()
            total = made.comm.allreduce(torch.ones(numel))
            assert total.tolist() == [4.0] * numel
            assert len(calls) == num_calls


@pytest.mark.ranks(2, 3)
def test_successive_worlds_may_have_any_order_of_ranks(world):
    for _ in range(2):
        made = connect(world.Split(0, -world.rank), HOROVOD)  # in reverse order
        assert made.comm.allreduce(torch.tensor([world.rank])).item() == sum(range(world.size))
        close(made)
    assert not library().torch.is_initialized()


@pytest.mark.ranks(2, 3)
def test_second_concurrent_world_is_rejected(world, comm):
    for ranks in (find_world(), world.Split(0, -world.rank)):
        with pytest.raises(LaunchError, match="must not be initialized twice in a process"):
            connect(ranks, HOROVOD)
    assert comm.allreduce(torch.ones(1)).item() == world.size


@pytest.mark.ranks(2, 3)
def test_rank_without_horovod_raises_on_every_rank(world, monkeypatch):
    def missing():
        raise LaunchError("Horovod is not installed; `hpctrain horovod build`")

    if world.rank == 1:
        monkeypatch.setattr(horovod_engine, "library", missing)
    with pytest.raises(LaunchError, match="rank 1: Horovod is not installed; `hpctrain horovod"):
        connect(find_world(), HOROVOD)


@pytest.mark.ranks(2)
def test_error_inside_horovod_raises_comm_error(comm):
    library().torch.shutdown()
    own = r"Horovod 0\.\d+\.\d+ failed: .*not been initialized"
    # A rank that is late finds the failure of another one.
    with pytest.raises(CommError, match=rf"{own}|a call of this one has failed on rank"):
        comm.allreduce_(torch.ones(1))


@pytest.mark.ranks(2)
def test_variables_of_horovod_are_kept_and_hpctrain_settings_take_precedence(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
    monkeypatch.setenv("HOROVOD_TIMELINE", "a.json")
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    found = horovod_engine.variables_for(Settings.from_env())
    assert found["HOROVOD_FUSION_THRESHOLD"] == "1024"
    assert found["HOROVOD_TIMELINE"] is None
    assert "HOROVOD_CYCLE_TIME" not in found
    ours = replace(HOROVOD, fusion_bytes=0, cycle_s=0.0005)
    found = horovod_engine.variables_for(ours)
    assert found["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert found["HOROVOD_CYCLE_TIME"] == "0.5"


@pytest.mark.ranks(2)
def test_a_plan_of_another_engine_is_refused(tmp_path_factory, world):
    with connected(HOROVOD) as made:
        path = world.bcast(tmp_path_factory.mktemp("plans") / "plan.json")
        if world.rank == 0:
            path.write_text(json.dumps(StoredPlan.of(made.topology, made.plan).as_dict()))
    world.Barrier()
    with connected(replace(HOROVOD, plan=path)) as pinned:
        assert pinned.plan == made.plan
    with pytest.raises(ConfigError, match="engine horovod, and HPCTRAIN_ENGINE is hpctrain"):
        connect(find_world(), Settings(probe="off", plan=path))
