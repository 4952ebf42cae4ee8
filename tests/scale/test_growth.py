"""The work of functions that each rank calls with a list of all ranks is linear in the list."""

import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from hpctrain.checkpoint.format.manifest import (
    CheckpointManifest,
    FileRecord,
    Record,
    StoredPart,
)
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.checkpoint.loading import _by_file
from hpctrain.checkpoint.saving import divide
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm.agreement import gather_distinct, merge_messages
from hpctrain.comm.control_channel.mailbox import tree_of
from hpctrain.comm.plan.choice import choose_plan
from hpctrain.comm.spares import workers_of
from hpctrain.core.config import Settings
from hpctrain.data.order.order import Sequential, global_order
from hpctrain.data.steps import Division, Steps
from hpctrain.negotiation.stall import (
    Answers,
    Inquiry,
    Question,
    RankActivity,
    SetMember,
    describe,
)
from hpctrain.runtime.process_set_table import Wanted, wanted_by_all
from tests.harness.growth import MAX_SLOPE, slope, slope_of
from tests.scale.engines import node_lists

SIZES = 64, 512


def facts_of(size):
    return [RankFacts(host=f"node{rank // 16}", cores=(rank % 16,)) for rank in range(size)]


def topology(size):
    return partial(Topology.from_facts, facts_of(size), size - 1)


def tree(size):
    return partial(tree_of, node_lists(size, 16), size - 1)


def plan(size):
    made, threads = Topology.from_facts(facts_of(size), 0), [1] * size
    return partial(choose_plan, made, Settings(), node_memory="memfd", threads=threads)


def division(size):
    tensors = {f"w{number}": ("float32", (4096, 1024)) for number in range(10)}
    return partial(divide, tensors, size)


def manifest_of(size):
    files = tuple(
        FileRecord((range(first, first + 16),), (), 0, first) for first in range(0, size, 16)
    )
    record = Record("float32", (size, 4), files=(0, files[-1].first_rank))
    return CheckpointManifest(
        step=1, world=size, files=files, facts={}, skeleton=None, tensors={"w": record}
    )


def manifest(size):
    return manifest_of(size).to_bytes


def parsed_manifest(size):
    return partial(CheckpointManifest.parse, manifest_of(size).to_bytes(), Path("step-00000001"))


def parts_to_read(size):
    rows = [Shard((size, 4), (rank, 0), (1, 4)) for rank in range(size)]
    parts = [StoredPart(rank, shard, (rank,), rank // 16 * 16) for rank, shard in enumerate(rows)]
    record = Record("float32", (size, 4), tuple(parts))
    return partial(_by_file, [({"w": record}, {})], size // 2)


def stall_report(size):
    every, names = (1 << size) - 1, {"loss": 30.0}
    places = {RankActivity("none", (), "main"): (1 << 5, 1.0)}
    answers = Answers((0, 1), every, {"loss": every & ~(1 << 5)}, {"loss": 1 << 5}, places)
    members = [SetMember(rank, f"node{rank // 16}") for rank in range(size)]
    return partial(describe, Inquiry(Question((0, 1), names, False), 0.0, answers, 0), members)


def process_sets(size):
    wanted = [Wanted((0, 1), False), Wanted((2, 3), False)]
    return partial(wanted_by_all, [wanted] * size)


def refusals(size):
    return partial(merge_messages, [f"fault {rank % 3}" for rank in range(size)])


@pytest.mark.parametrize(
    "work",
    [
        *(topology, tree, plan, division, manifest, parsed_manifest, parts_to_read),
        *(stall_report, process_sets, refusals),
    ],
)
def test_operations_grow_with_the_number_of_ranks(work):
    assert slope_of(work, SIZES) < MAX_SLOPE


class Text(str):
    """Text that counts comparisons, which are no operations of Python in a search of a list."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other):
        Text.num_compared += 1
        return str(self) == str(other)

    __hash__ = str.__hash__

    def split(self, *arguments):
        return [Text(part) for part in str.split(self, *arguments)]


def spares(size):
    hosts = [Text(f"node{rank // 16}") for rank in range(size)]
    return partial(workers_of, hosts, size - 2)


def different_values(size):
    def gather(value):
        texts = [value if rank == 0 else f"{rank} 0" for rank in range(size)]
        return [Text(each) for each in texts] if isinstance(value, str) else [value] * size

    return partial(gather_distinct, gather, ["a line"])


@pytest.mark.parametrize("work", [spares, different_values])
def test_comparisons_grow_with_the_number_of_ranks(work):
    counts = []
    for size in SIZES:
        act, Text.num_compared = work(size), 0
        act()
        counts.append((size, 1 + Text.num_compared))
    assert slope(counts) < MAX_SLOPE


@pytest.mark.parametrize("order", [Sequential(), global_order(1 << 22, 0, 0)])
def test_a_rank_computes_the_indices_of_its_own_samples_only(order):
    """Let the memory of the indices of a step not depend on the number of ranks."""
    counts = []
    for size in (1 << 12, 1 << 16):
        division = Division(global_batch=16 * size, rank=size // 2, size=size)
        steps = Steps(order, division, range(1 << 22))
        steps.samples(0)
        tracemalloc.start()
        assert len(steps.samples(2)) == 16
        counts.append((size, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
    assert slope(counts) < 0.1


def test_hosts_provide_spares_alternately():
    assert workers_of(["a", "a", "b", "a", "b"], 3) == [0, 2, 1]
    assert workers_of(["a", "b", "c", "c"], 3) == [0, 1, 2]
