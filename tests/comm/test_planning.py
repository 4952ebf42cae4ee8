"""Check the origin of a plan: the user, the cache, a measurement, or the default rule."""

import json

import pytest

from hpctrain.comm.plan.planning import StoredPlan
from hpctrain.core import config
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from tests.comm.conftest import connected


@pytest.fixture
def folder(world, tmp_path):
    """Return one folder for all ranks."""
    return world.bcast(tmp_path)


@pytest.fixture(autouse=True)
def _empty_cache(folder, monkeypatch):
    monkeypatch.setattr(config, "cache_folder", lambda: folder)


def planned(**settings):
    with connected(Settings(**settings)) as connection:
        return connection


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("per_node", [None, 2])
def test_a_second_run_has_the_plan_of_the_first(world, folder, per_node):
    first = planned(ranks_per_node=per_node)
    assert first.plan_origin == "measurement"
    second = planned(ranks_per_node=per_node)
    assert second.plan_origin == "a measurement in an earlier run"
    assert set(world.allgather(second.plan)) == {first.plan}
    assert planned(ranks_per_node=per_node, probe="fresh").plan_origin == "measurement"
    off = planned(ranks_per_node=per_node, probe="off")
    assert (off.plan_origin, off.plan.measured) == ("rule", ())
    assert len(list((folder / "plans").iterdir())) == 1


@pytest.mark.ranks(2, 3, 4)
def test_settings_that_change_the_rule_are_measured_separately():
    planned()
    assert planned(bucket_bytes=12345).plan.bucket_bytes == 12345
    assert planned(ranks_per_node=1).plan_origin == "measurement"


@pytest.mark.ranks(1, 2, 3, 4)
def test_one_rank_and_flat_mpi_measure_nothing(folder):
    assert planned(shared_memory="off", probe="fresh").plan_origin == "rule"
    assert not (folder / "plans").exists()


def write_plan(world, folder, connection):
    file = folder / "plan.json"
    if world.rank == 0:
        stored = StoredPlan.of(connection.topology, connection.plan)
        file.write_text(json.dumps(stored.as_dict()))
    world.Barrier()
    return file


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("memory", ["auto", "off"])
def test_named_plan_is_used_unchanged(world, folder, memory):
    before = planned(shared_memory=memory, bucket_bytes=12345, overlap="inline")
    file = write_plan(world, folder, before)
    again = planned(plan=file)
    assert again.plan_origin == str(file)
    assert again.plan == before.plan


@pytest.mark.ranks(2, 3, 4)
def test_named_plan_of_another_world_raises_on_every_rank(world, folder):
    file = write_plan(world, folder, planned())
    with pytest.raises(ConfigError, match=f"1 node of {world.size} ranks, and this world has"):
        planned(plan=file, ranks_per_node=1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_named_file_without_a_plan_raises_on_every_rank(folder):
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read as a plan"):
        planned(plan=folder / "missing.json")
