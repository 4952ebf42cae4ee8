"""Plans on disk: what is read fits the world, and nothing wrong with a cache stops a run."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.comm.plan.choice import rail_rule, tensors_rule
from hpctrain.comm.plan.plan import SizeTable
from hpctrain.comm.plan.planning import StoredPlan, key_of, load_cached, store_cached
from hpctrain.core import config
from hpctrain.core.errors import ConfigError
from tests.comm.test_plan import plan_for, topology_of

ONE = topology_of(4)
TWO = topology_of(4, per_node=2)
STORED = StoredPlan.of(TWO, plan_for(4, per_node=2))


def test_what_was_written_is_read(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"topology": "for people", **STORED.as_dict()}))
    assert StoredPlan.read(file) == STORED


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name"),
        ("[]", "no table with the keys nodes and plan"),
        ('{"plan": {}}', "nodes must list the ranks of each node, got None"),
        ('{"nodes": [2], "plan": 3}', "plan must be a table, got 3"),
        ('{"nodes": [2], "plan": {}}', "node_memory is missing"),
        ("\udcff", "invalid start byte"),
    ],
)
def test_a_file_that_is_no_plan_is_an_error_that_names_it(tmp_path, content, problem):
    file = tmp_path / "plan.json"
    if content is not None:
        file.write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=problem) as caught:
        StoredPlan.read(file)
    assert str(file) in str(caught.value)


def stored_with(**changes):
    return replace(STORED, plan=replace(STORED.plan, **changes))


@pytest.mark.parametrize(
    ("stored", "topology", "memory", "problem"),
    [
        (STORED, TWO, "memfd", ""),
        (STORED, ONE, "memfd", "for 2 nodes of 2 ranks, and this world has 1 node of 4 ranks"),
        (STORED, topology_of(3, per_node=2), "memfd", "2 nodes of 1 to 2 ranks"),
        (STORED, TWO, "window", "node memory memfd, and this world has window"),
        (stored_with(num_rails=3), TWO, "memfd", "3 rails, and this world can have 1 to 2"),
        (stored_with(num_rails=0), TWO, "memfd", "0 rails"),
        (stored_with(num_rails=1), TWO, "memfd", ""),
        (stored_with(rail=SizeTable(((0, "magic"),))), TWO, "memfd", "its rail go by magic"),
        (stored_with(tensors=tensors_rule(1, "memfd", 5)), TWO, "memfd", "direct, slices"),
        (StoredPlan.of(ONE, plan_for(4)), ONE, "memfd", ""),
        (StoredPlan.of(ONE, replace(plan_for(4), rail=rail_rule(4))), ONE, "memfd", "rail"),
    ],
)
def test_a_plan_fits_the_world_that_it_was_made_for(stored, topology, memory, problem):
    found = stored.misfit(topology, memory)
    assert problem in found
    assert bool(found) == bool(problem)


def test_equal_facts_have_the_same_key_and_others_another():
    facts = {"nodes": TWO.nodes, "mpi": "an MPI 5.0"}
    assert key_of(facts) == key_of(dict(reversed(facts.items())))
    assert key_of(facts) != key_of(facts | {"mpi": "an MPI 5.1"})


def test_what_is_remembered_is_found_again():
    assert load_cached("nothing") is None
    store_cached("something", STORED)
    assert load_cached("something") == STORED
    (file,) = (config.cache_folder() / "plans").glob("something*")
    assert file.suffix == ".json"


def test_what_is_remembered_has_its_name_when_it_is_on_disk(disk, monkeypatch):
    monkeypatch.setattr(config, "cache_folder", lambda: disk.root)
    store_cached("something", STORED)
    assert disk.kept(disk.root / "plans" / "something.json")


def test_a_damaged_memory_counts_as_none(caplog):
    store_cached("damaged", STORED)
    (config.cache_folder() / "plans" / "damaged.json").write_text("{")
    with caplog.at_level(logging.DEBUG, logger="hpctrain"):
        assert load_cached("damaged") is None
    assert "left aside" in caplog.text


@pytest.mark.parametrize("folder", [None, Path("/proc/none"), Path("/dev/null/none")])
def test_where_nothing_can_be_remembered_nothing_is(monkeypatch, folder):
    monkeypatch.setattr(config, "cache_folder", lambda: folder)
    store_cached("key", STORED)
    assert load_cached("key") is None
