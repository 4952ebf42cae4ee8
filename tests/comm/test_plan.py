"""Check that fixed rules derive a plan from facts, and that a plan can be stored in a file."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm.plan.choice import choose_plan, plan_for_group, rail_rule, tensors_rule
from hpctrain.comm.plan.plan import Measurement, Plan, SizeTable
from hpctrain.comm.plan.planning import StoredPlan, key_of, load_cached, store_cached
from hpctrain.core import config
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import KIB, MIB


def topology_of(num_ranks, num_cores=64, *, per_node=None, cards=1):
    cores = tuple(range(num_cores))
    facts = [RankFacts(host="a", cores=cores, cards=cards) for _ in range(num_ranks)]
    return Topology.from_facts(facts, 0, per_node)


def plan_for(num_ranks, num_cores=64, *, threads=1, per_node=None, cards=1, **settings):
    return choose_plan(
        topology_of(num_ranks, num_cores, per_node=per_node, cards=cards),
        Settings(**settings),
        node_memory="memfd",
        threads=[threads] * num_ranks,
    )


MEASURED = replace(
    plan_for(8, per_node=2),
    rail=SizeTable(((0, "doubling"), (16 * KIB, "ring"))),
    measured=(
        Measurement("rail", 4 * KIB, "doubling", (9e-6, 12.3e-6, 1e-3)),
        Measurement("rail", 4 * KIB, "ring", (45.6e-6,)),
        Measurement("rail", 64 * KIB, "ring", (1e-3, 2e-3)),
        Measurement("tensors", 4 * KIB, "levels", (1e-3,)),
    ),
)


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "threads", "overlap"),
    [
        (1, 8, 1, "end"),
        (2, 2, 1, "end"),
        (4, 2, 1, "end"),
        (2, 4, 1, "thread"),
        (2, 8, 4, "end"),
        (2, 8, 3, "thread"),
    ],
)
def test_a_thread_is_used_only_where_it_has_a_core(num_ranks, num_cores, threads, overlap):
    assert plan_for(num_ranks, num_cores, threads=threads).overlap == overlap


def test_a_setting_beats_the_rule():
    assert plan_for(4, 2, threads=1, overlap="inline").overlap == "inline"


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "cards", "rails"),
    [(4, None, 1, 0), (4, 2, 1, 2), (4, 1, 1, 1), (8, 4, 1, 2), (8, 4, 2, 4), (5, 3, 4, 2)],
)
def test_rails_are_twice_the_network_adapters_and_at_most_the_smallest_node(
    num_ranks, per_node, cards, rails
):
    assert plan_for(num_ranks, per_node=per_node, cards=cards).num_rails == rails


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 64, 70_000])
def test_on_one_node_every_rank_reads_all_values_only_of_small_tensors(num_ranks):
    table = tensors_rule(1, "memfd", num_ranks)
    assert table.at(0) == "direct"
    assert (table.at(1 << 30) == "slices") == (num_ranks > 4)
    limits = [size for size, _ in table.steps[1:]]
    assert all(size * (num_ranks - 2) <= 64 * KIB or size == 1 for size in limits)


def test_ranks_that_share_cores_sum_large_tensors_by_slices():
    for num_ranks in (2, 4):
        oversubscribed = plan_for(num_ranks, num_cores=num_ranks // 2).tensors
        assert (oversubscribed.at(64 * KIB), oversubscribed.at(MIB)) == ("direct", "slices")
        assert plan_for(num_ranks).tensors == SizeTable(((0, "direct"),))


def test_sums_between_nodes_use_levels_or_the_library_without_node_memory():
    assert tensors_rule(2, "memfd", 2) == SizeTable(((0, "levels"),))
    assert tensors_rule(2, "none", 2) == tensors_rule(1, "none", 4) == SizeTable(((0, "library"),))


def test_group_over_several_nodes_keeps_the_tables():
    table = SizeTable(((0, "halving"),))
    plan = replace(MEASURED, rail=table, tensors=SizeTable(((0, "library"),)))
    several = plan_for_group(plan, topology_of(3, per_node=1))
    assert (several.rail, several.tensors) == (table, plan.tensors)
    assert (several.num_rails, several.measured) == (1, ())
    one = plan_for_group(plan, topology_of(3))
    assert (one.num_rails, one.tensors) == (0, tensors_rule(1, "memfd", 3))
    assert plan_for_group(one, topology_of(2)).tensors == one.tensors


def test_group_without_node_memory_uses_the_library():
    flat = choose_plan(topology_of(4, per_node=2), Settings(), node_memory="none", threads=[1] * 4)
    for topology in (topology_of(2), topology_of(2, per_node=1)):
        group = plan_for_group(flat, topology)
        assert (group.num_rails, group.tensors) == (0, SizeTable(((0, "library"),)))


@pytest.mark.parametrize("plan", [plan_for(4), MEASURED])
def test_plan_is_restored_from_json(plan):
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_plan_of_an_older_version_lacks_batching_fields():
    values = MEASURED.as_dict()
    del values["fusion_bytes"], values["cycle_s"], values["chunk_bytes"]
    assert Plan.from_dict(values) == MEASURED


def test_missing_and_unknown_fields_are_reported():
    values = MEASURED.as_dict() | {"color": "red"}
    del values["threads"]
    with pytest.raises(ConfigError, match="threads is missing, color is unknown"):
        Plan.from_dict(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node_memory", "paper"),
        ("num_rails", -1),
        ("num_rails", True),
        ("threads", 0),
        ("bucket_bytes", "25 MiB"),
        ("overlap", "auto"),
        ("tensors", [[1, "direct"]]),
        ("tensors", "direct"),
        ("rail", [[0, 1]]),
        ("rail", None),
        ("fusion_bytes", -1),
        ("fusion_bytes", 1.5),
        ("cycle_s", -1e-3),
        ("cycle_s", "1 ms"),
        ("cycle_s", float("inf")),
        ("chunk_bytes", -1),
        ("measured", [{"what": "rail"}]),
        ("measured", [{"what": "rail", "num_bytes": 1, "algorithm": "ring", "runs": 3}]),
    ],
)
def test_wrong_value_is_rejected_with_the_name_of_its_field(name, value):
    with pytest.raises(ConfigError, match=f"^{name} of a plan cannot be "):
        Plan.from_dict(MEASURED.as_dict() | {name: value})


def test_the_description_names_path_and_algorithms():
    rows = dict(MEASURED.describe())
    assert rows["gradient path"] == "node memory (memfd), then 2 rails"
    assert rows["between nodes"] == "doubling below 16.0 KiB, then ring"
    cut = replace(MEASURED, chunk_bytes=128 * KIB)
    assert dict(cut.describe())["between nodes"] == f"{rows['between nodes']}, 128.0 KiB at a time"
    assert rows["other tensors"] == "levels"
    assert rows["small operations"] == "fused up to 64.0 MiB"
    waiting = replace(MEASURED, fusion_bytes=256 * KIB, cycle_s=2e-3)
    assert dict(waiting.describe())["small operations"] == "fused up to 256.0 KiB, after 2.00 ms"
    assert "between nodes" not in dict(plan_for(4).describe())


def test_table_of_measurements_marks_the_chosen_algorithm():
    assert MEASURED.measurements("rail") == [
        ("size", "doubling", "ring"),
        ("4.0 KiB", "12.3 us *", "45.6 us"),
        ("64.0 KiB", "", "1.50 ms *"),
    ]
    assert plan_for(4).measurements("tensors") == []


ONE = topology_of(4)
TWO = topology_of(4, per_node=2)
STORED = StoredPlan.of(TWO, plan_for(4, per_node=2))


def test_written_plan_is_read_back(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"topology": "for people", **STORED.as_dict()}))
    assert StoredPlan.read(file) == STORED


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name"),
        ("[]", "must be a table with the keys nodes and plan"),
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
        (STORED, TWO, "none", "node memory memfd, and this world has none"),
        (stored_with(num_rails=3), TWO, "memfd", "3 rails, and this world supports 1 to 2"),
        (stored_with(num_rails=0), TWO, "memfd", "0 rails"),
        (stored_with(num_rails=1), TWO, "memfd", ""),
        (
            stored_with(rail=SizeTable(((0, "magic"),))),
            TWO,
            "memfd",
            "table rail of the plan has magic",
        ),
        (stored_with(tensors=tensors_rule(1, "memfd", 5)), TWO, "memfd", "direct, slices"),
        (StoredPlan.of(ONE, plan_for(4)), ONE, "memfd", ""),
        (StoredPlan.of(ONE, replace(plan_for(4), rail=rail_rule(4))), ONE, "memfd", "rail"),
    ],
)
def test_a_plan_fits_the_world_that_it_was_made_for(stored, topology, memory, problem):
    found = stored.misfit(topology, memory)
    assert problem in found
    assert bool(found) == bool(problem)


def test_cache_key_depends_on_facts_only():
    facts = {"nodes": TWO.nodes, "mpi": "an MPI 5.0"}
    assert key_of(facts) == key_of(dict(reversed(facts.items())))
    assert key_of(facts) != key_of(facts | {"mpi": "an MPI 5.1"})


def test_cached_plan_is_loaded_unless_it_is_damaged(caplog):
    assert load_cached("something") is None
    store_cached("something", STORED)
    assert load_cached("something") == STORED
    (file,) = (config.cache_folder() / "plans").glob("something*")
    assert file.suffix == ".json"
    file.write_text("{")
    with caplog.at_level(logging.DEBUG, logger="hpctrain"):
        assert load_cached("something") is None
    assert "earlier measurement is ignored" in caplog.text


def test_cached_plan_is_on_disk_before_it_is_renamed(disk, monkeypatch):
    monkeypatch.setattr(config, "cache_folder", lambda: disk.root)
    store_cached("something", STORED)
    assert disk.kept(disk.root / "plans" / "something.json")


@pytest.mark.parametrize("folder", [None, Path("/proc/none"), Path("/dev/null/none")])
def test_unusable_cache_folder_is_ignored(monkeypatch, folder):
    monkeypatch.setattr(config, "cache_folder", lambda: folder)
    store_cached("key", STORED)
    assert load_cached("key") is None
