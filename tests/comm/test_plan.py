"""The plan follows from facts by rule."""

import pytest

from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm.plan import choose_plan
from hpctrain.config import Settings


def plan_for(num_ranks, num_cores, *, threads, per_node=None, cards=1, **settings):
    cores = tuple(range(num_cores))
    facts = [RankFacts(host="a", cores=cores, cards=cards) for _ in range(num_ranks)]
    topology = Topology.from_facts(facts, 0, per_node)
    chosen = Settings(**settings)
    return choose_plan(topology, chosen, node_memory="memfd", threads=[threads] * num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "threads", "overlap"),
    [
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
def test_rails_are_twice_the_cards_and_no_more_than_the_smallest_node(
    num_ranks, per_node, cards, rails
):
    assert plan_for(num_ranks, 64, threads=1, per_node=per_node, cards=cards).num_rails == rails


def test_the_description_names_the_path():
    text = dict(plan_for(4, 8, threads=1, per_node=2).describe())["gradients take"]
    assert text == "node memory (memfd), then 2 rails"
