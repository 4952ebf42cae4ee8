import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.core.errors import TopologyError
from tests.harness.growth import MAX_SLOPE, slope_of


def facts_on(*hosts, cores=(0, 1), cards=1):
    return [RankFacts(host=host, cores=cores, cards=cards) for host in hosts]


def world(facts, ranks_per_node=None):
    return [Topology.from_facts(facts, rank, ranks_per_node) for rank in range(len(facts))]


@st.composite
def layouts(draw):
    """Draw the hosts of all ranks: any number of ranks per host, in any order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    hosts = [f"host{i}" for i, size in enumerate(sizes) for _ in range(size)]
    return draw(st.permutations(hosts))


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("babaa", ((0, 2), (1, 3, 4))),
        ("abc", ((0,), (1,), (2,))),
        ("aaaa", ((0, 1, 2, 3),)),
        ("a", ((0,),)),
    ],
    ids=["block", "cyclic", "unequal", "one rank per node", "one node", "alone"],
)
def test_nodes_are_in_the_order_of_their_lowest_rank(hosts, nodes):
    for topology in world(facts_on(*hosts)):
        assert topology.nodes == nodes
        assert topology.hosts == tuple(hosts[ranks[0]] for ranks in nodes)


@given(layouts(), st.none() | st.integers(1, 4))
def test_every_rank_is_on_exactly_one_node_and_all_see_the_same(hosts, ranks_per_node):
    topologies = world(facts_on(*hosts), ranks_per_node)
    for topology in topologies:
        assert sorted(rank for node in topology.nodes for rank in node) == list(range(len(hosts)))
        assert all(list(node) == sorted(node) for node in topology.nodes)
        assert [node[0] for node in topology.nodes] == sorted(node[0] for node in topology.nodes)
        assert topology.nodes[topology.node][topology.local_rank] == topology.rank
    assert len({(t.nodes, t.hosts, t.max_rails, t.cards) for t in topologies}) == 1
    assert len({(t.node, t.local_rank) for t in topologies}) == len(hosts)


@given(layouts(), st.none() | st.integers(1, 4))
def test_ranks_of_one_rail_have_one_local_rank_and_different_nodes(hosts, ranks_per_node):
    topologies = world(facts_on(*hosts), ranks_per_node)
    for mine in topologies:
        rail = [topologies[rank] for rank in mine.cross_ranks]
        assert {other.local_rank for other in rail} == {mine.local_rank}
        assert len({other.node for other in rail}) == len(rail) == mine.cross_size
        assert [other.cross_rank for other in rail] == list(range(len(rail)))


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_positions_are_found_in_linear_time(ranks_per_node):
    def work(num_nodes):
        hosts = [str(number) for number in range(num_nodes) for _ in range(ranks_per_node)]
        last = Topology.from_facts(facts_on(*hosts), len(hosts) - 1)
        return lambda: (last.local_rank, last.cross_rank, last.cross_size, last.host_rank)

    assert slope_of(work, (64, 1024)) < MAX_SLOPE


@given(layouts(), st.integers(1, 4))
def test_declared_nodes_are_on_one_host_with_at_most_the_declared_ranks(hosts, ranks_per_node):
    topology = world(facts_on(*hosts), ranks_per_node)[0]
    for node, name in zip(topology.nodes, topology.hosts, strict=True):
        assert len(node) <= ranks_per_node
        assert {hosts[rank] for rank in node} == {name.partition("#")[0]}
    assert len(set(topology.hosts)) == topology.num_nodes


@given(layouts())
def test_every_slice_of_a_rail_has_an_owner_on_every_node(hosts):
    topology = world(facts_on(*hosts))[0]
    assert all(len(node) >= topology.max_rails for node in topology.nodes)
    assert topology.is_homogeneous == all(len(n) == topology.max_rails for n in topology.nodes)


def test_ranks_of_a_host_are_counted_over_its_declared_nodes():
    facts = [RankFacts(host=host, cores=(0,)) for host in "ababaab"]
    of_ranks = [Topology.from_facts(facts, rank, 2).host_rank for rank in range(7)]
    assert of_ranks == [0, 0, 1, 1, 2, 3, 2]


def test_four_ranks_of_one_host_are_two_declared_nodes():
    topology = world(facts_on(*"aaaa"), ranks_per_node=2)[3]
    assert topology.nodes == ((0, 1), (2, 3))
    assert topology.hosts == ("a#1", "a#2")
    assert (topology.node, topology.local_rank, topology.local_size) == (1, 1, 2)
    assert (topology.cross_rank, topology.cross_size, topology.cross_ranks) == (1, 2, (1, 3))


def test_a_host_with_no_more_ranks_than_declared_keeps_its_name():
    assert world(facts_on(*"aab"), ranks_per_node=2)[0].hosts == ("a", "b")


def test_a_node_that_ranks_name_themselves_beats_the_host():
    facts = [RankFacts(host="vm", node=node, cores=(0,)) for node in ("x", "y", "x", "y")]
    assert world(facts)[0].nodes == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("cores", "ranks_per_node", "shared", "peers"),
    [
        (((0, 1),) * 4, 2, (0, 1, 2, 3), (0, 1, 2, 3)),  # across declared nodes
        (((0,), (1,)), None, (), (0,)),
        (((0, 1, 2, 3),) * 2, None, (), (0, 1)),
    ],
    ids=["crowded", "bound", "a core for each"],
)
def test_cores_are_shared_when_ranks_outnumber_them(cores, ranks_per_node, shared, peers):
    facts = [RankFacts(host="a", cores=mask) for mask in cores]
    topology = world(facts, ranks_per_node)[0]
    assert (topology.shared_cores, topology.core_peers) == (shared, peers)


def test_ranks_bound_to_one_core_on_different_hosts_share_none():
    assert world(facts_on("a", "b", cores=(0,)))[0].shared_cores == ()


def test_node_with_fewest_adapters_decides():
    facts = [RankFacts(host=host, cores=(0,), cards=cards) for host, cards in (("a", 4), ("b", 2))]
    assert {t.cards for t in world(facts)} == {2}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": -1}, "one of the 2 .* got -1"),
        ({"rank": 2}, "one of the 2 .* got 2"),
        ({"rank": 0, "ranks_per_node": 0}, "at least 1, got 0"),
    ],
)
def test_invalid_topology_raises(options, text):
    with pytest.raises(TopologyError, match=text):
        Topology.from_facts(facts_on("a", "a"), **options)


def test_description_names_ranks_nodes_and_cores():
    rows = dict(world(facts_on(*"aaaa"), ranks_per_node=2)[1].describe())
    assert rows["ranks"] == "4 on 2 nodes, 2 per node"
    assert rows["nodes"] == "a#1: 0-1; a#2: 2-3"
    assert rows["cores"] == "0-1 of rank 1, 2 for 4 ranks"
    assert dict(world(facts_on(*"aab"))[0].describe())["ranks"] == "3 on 2 nodes, 1-2 per node"


def test_description_of_a_thousand_nodes_is_short():
    rows = dict(world(facts_on(*(f"n{i}" for i in range(1000))))[0].describe())
    assert rows["nodes"].startswith("n0: 0; n1: 1;")
    assert rows["nodes"].endswith("... 992 more ...; n999: 999")
    assert len(rows["nodes"]) < 200


def test_group_keeps_nodes_and_renumbers_ranks():
    facts = [RankFacts(host=host, cores=(0, 1)) for host in ("a", "b", "a", "b", "c")]
    group = Topology.from_facts(facts, 3).of_group([4, 3, 0, 1])
    assert (group.rank, group.size, group.num_nodes) == (1, 4, 3)
    assert group.nodes == ((0,), (1, 3), (2,))
    assert group.hosts == ("c", "b", "a")
    assert (group.node, group.local_rank, group.core_peers) == (1, 0, (1, 3))
    with pytest.raises(TopologyError, match="must contain this rank, got 0-1 on rank 3"):
        Topology.from_facts(facts, 3).of_group([0, 1])
