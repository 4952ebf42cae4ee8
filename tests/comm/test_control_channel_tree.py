"""The tree of mailboxes, for any ranks on any nodes."""

import random

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.control_channel.mailbox import FAN_OUT, Tree, tree_of


@st.composite
def worlds(draw: st.DrawFn) -> list[list[int]]:
    """Deal ranks out to nodes, in any order."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=40))
    ranks = list(range(sum(sizes)))
    random.Random(draw(st.integers())).shuffle(ranks)
    return [[ranks.pop() for _ in range(size)] for size in sizes]


def trees_of(nodes: list[list[int]]) -> list[Tree]:
    return [tree_of(nodes, rank) for rank in range(sum(map(len, nodes)))]


def path_to_root(trees: list[Tree], rank: int) -> list[int]:
    path = [rank]
    while (parent := trees[path[-1]].parent) is not None:
        path.append(parent)
    return path


@given(worlds())
def test_every_rank_is_connected_with_rank_0_and_both_ends_know_of_each_edge(nodes):
    trees = trees_of(nodes)
    for rank, tree in enumerate(trees):
        assert (tree.rank, tree.size) == (rank, len(trees))
        assert path_to_root(trees, rank)[-1] == 0
        assert all(trees[child].parent == rank for child in tree.children)
        assert tree.parent is None or rank in trees[tree.parent].children
        assert set(tree.neighbours) == {*tree.children, tree.parent} - {None}
        assert len(tree.children) == len(set(tree.children)) <= 2 * FAN_OUT


@given(worlds())
def test_only_the_first_rank_of_a_node_has_a_parent_on_another_node(nodes):
    trees = trees_of(nodes)
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    for ranks in nodes:
        for rank in set(ranks) - {min(ranks)}:
            assert node_of[trees[rank].parent] == node_of[rank]


def test_a_thousand_ranks_are_a_few_steps_from_the_root():
    one_each = trees_of([[rank] for rank in range(1000)])
    of_sixteen = trees_of([list(range(n, n + 16)) for n in range(0, 1008, 16)])
    assert max(len(path_to_root(one_each, rank)) for rank in range(1000)) - 1 == 5
    assert max(len(path_to_root(of_sixteen, rank)) for rank in range(1008)) - 1 == 5
