"""Check the owners of the rows of a table, for any placement of ranks."""

from itertools import pairwise

import numpy as np
import pytest

from hpctrain.async_sgd.sharded_embedding_rows import RowOwners, keys_at, rows_of

PLACEMENTS = {
    "one rank": [(0,)],
    "one node": [(0, 1, 2)],
    "two nodes": [(0, 1), (2, 3)],
    "scattered": [(0, 2, 5), (1,), (3, 4)],
}


@pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 24, 1000])
def test_each_row_has_one_owner_and_a_node_owns_one_range(nodes, num_rows):
    of_rank = {r: RowOwners(num_rows, nodes, r) for node in nodes for r in node}
    rows = [row for one in of_rank.values() for row in range(one.start, one.stop)]
    assert sorted(rows) == [*range(num_rows)]
    for node in nodes:
        starts = [(of_rank[rank].start, of_rank[rank].stop) for rank in node]
        assert all(stop == start for (_, stop), (start, _) in pairwise(starts))
    for rank, one in of_rank.items():
        assert one.range_of(one.ranks.index(rank)) == (one.start, one.stop)
        assert one.size <= one.per_rank


@pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)
def test_one_rank_of_each_node_exchanges_rows_with_an_owner(nodes):
    owners = sum(map(len, nodes))
    for node in nodes:
        partners = [owner for r in node for owner in RowOwners(50, nodes, r).partners]
        assert sorted(partners) == [*range(owners)]
        assert all(
            one.ranks.index(rank) in one.partners
            for rank in node
            for one in [RowOwners(50, nodes, rank)]
        )


def test_keys_are_divided_by_owner():
    one = RowOwners(10, [(0, 1), (2,)], 1)
    parts = [keys_at(np.array([0, 3, 9])), keys_at(np.array([3, 4, 8]), 100)]
    found = [rows_of(one.keys_for(parts, owner)).tolist() for owner in range(3)]
    assert found == [[0, 3, 3], [4], [9, 8]]
