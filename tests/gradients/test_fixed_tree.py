"""Check leaves, micro-shards and the tree over them, without ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import ConfigError
from hpctrain.gradients.fixed_tree import (
    Node,
    aligned_part,
    num_samples_of,
    own_micro_shards,
    push,
    sample_range,
    seed_of,
    whole_nodes,
)

COUNTS = st.integers(0, 7).map(lambda power: 2**power)


def tree_sum(leaves: torch.Tensor) -> torch.Tensor:
    """Return the sum by definition: pairs, then pairs of pairs."""
    while len(leaves) > 1:
        leaves = leaves[0::2] + leaves[1::2]
    return leaves[0]


def summed(leaves: list[Node]) -> list[Node]:
    pending = []
    for leaf in leaves:
        push(pending, leaf, lambda *_: torch.zeros(3))
    return pending


@given(COUNTS, st.data())
def test_sums_of_any_ranges_are_bitwise_equal_to_the_tree(count, data):
    size = data.draw(st.integers(1, count))
    values = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    nodes = []
    for rank in range(size):
        own = own_micro_shards(count, rank, size)
        pending = summed([Node(0, i, [values[i].clone()]) for i in own])
        assert [(node.level, node.index) for node in pending] == whole_nodes(own)
        assert len(pending) <= max(1, 2 * (count.bit_length() - 1))
        nodes += pending
    (root,) = summed(nodes)
    assert torch.equal(root.values[0], tree_sum(values))


@given(COUNTS, st.integers(0, 1000), st.data())
def test_every_sample_and_every_micro_shard_is_in_one_rank(count, num_samples, data):
    size = data.draw(st.integers(1, count))
    owns = [own_micro_shards(count, rank, size) for rank in range(size)]
    assert [i for own in owns for i in own] == list(range(count))
    assert {len(own) for own in owns} <= {count // size, count // size + 1}
    parts = [sample_range(num_samples, count, own) for own in owns]
    assert [i for part in parts for i in part] == list(range(num_samples))


def test_missing_nodes_are_replaced_by_the_given_default():
    leaves = [None, 1.0, None, None]
    nodes = [
        Node(0, i, [None if x is None else torch.full((1,), x)]) for i, x in enumerate(leaves)
    ]
    pending = []
    for node in nodes:
        push(pending, node, lambda _, level: torch.full((1,), 10.0 * 2**level))
    assert pending[0].values[0].item() == 31.0
    pending = summed([Node(0, i, [None]) for i in range(4)])
    assert pending[0].values == [None]


def test_parts_are_copied_to_aligned_memory():
    memory = torch.arange(1000, dtype=torch.float32)
    batch = {"x": memory[3:903].view(90, 10), "more": [memory[1:91].to(torch.int16), memory[:90]]}
    assert num_samples_of(batch) == 90
    part = aligned_part(batch, slice(7, 20))
    for found, given_ in ((part["x"], batch["x"]), (part["more"][0], batch["more"][0])):
        assert torch.equal(found, given_[7:20])
        assert found.data_ptr() % 64 == 0
        assert found.is_contiguous()
    part["x"].zero_()
    assert memory[103] == 103


@pytest.mark.parametrize(
    "batch", [[], [torch.ones(2), torch.ones(3)], torch.ones(()), {"x": "text"}, None]
)
def test_a_batch_is_made_of_tensors_of_one_length(batch):
    with pytest.raises(ConfigError, match=r"of a batch|a batch must consist of"):
        num_samples_of(batch)


def test_seeds_are_distinct_and_fixed():
    seeds = {seed_of(*key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 11, 1))}
    assert len(seeds) == 5
    assert seed_of(0, 0, 0) == 14680368682093457738
