"""A window order is a bijection that reads whole blocks and mixes as a drawn one, nearly."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.core.units import KIB
from hpctrain.data.order.window import WindowShape, lane_blocks, rank_lanes, window_order

words = st.integers(0, 2**64 - 1)
shapes = st.builds(
    WindowShape, block=st.integers(1, 20), window=st.integers(1, 9), lanes=st.integers(1, 40)
)


def order_of(n, shape, seed=1, epoch=2):
    return window_order(n, seed, epoch, block=shape.block, window=shape.window, lanes=shape.lanes)


@settings(max_examples=50)
@given(n=st.integers(1, 3000), seed=words, epoch=words, shape=shapes)
@example(n=1, seed=0, epoch=0, shape=WindowShape(block=5, window=1, lanes=1))
@example(n=39, seed=0, epoch=0, shape=WindowShape(block=1, window=9, lanes=40))
def test_every_sample_has_one_position(n, seed, epoch, shape):
    order, positions = order_of(n, shape, seed, epoch), np.arange(n)
    samples = order.samples_at(positions)
    assert np.array_equal(np.sort(samples), positions)


@settings(max_examples=50)
@given(n=st.integers(2**40, 2**61), seed=words, shape=shapes, data=st.data())
def test_positions_of_any_size_have_samples_of_their_own(n, seed, shape, data):
    order = order_of(n, shape, seed)
    start = data.draw(st.integers(0, n - 1))
    samples = order.samples_at(np.arange(start, min(start + 5000, n)))
    assert samples.min() >= 0
    assert samples.max() < n
    assert len(np.unique(samples)) == len(samples)


@settings(max_examples=50)
@given(n=st.integers(1, 4000), shape=shapes, data=st.data())
def test_a_position_is_computed_without_the_others(n, shape, data):
    order = order_of(n, shape)
    samples = order.samples_at(np.arange(n))
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=5)), np.int64)
    assert np.array_equal(order.samples_at(some), samples[some])
    assert np.array_equal(order.samples_at(np.arange(n).reshape(1, -1)), samples[None])


@settings(max_examples=50)
@given(n=st.integers(1, 600), seed=words, shape=shapes)
def test_every_block_is_in_one_lane(n, seed, shape):
    lanes = [
        lane_blocks(n, seed, lane, block=shape.block, lanes=shape.lanes).tolist()
        for lane in range(shape.lanes)
    ]
    assert sorted(itertools.chain(*lanes)) == list(range(-(-n // shape.block)))
    sizes = [len(blocks) for blocks in lanes]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=50)
@given(n=st.integers(1, 600), epoch=words, shape=shapes)
def test_a_lane_reads_its_own_blocks_in_every_epoch(n, epoch, shape):
    order, positions = order_of(n, shape, 7, epoch), np.arange(n)
    blocks, lanes = order.samples_at(positions) // shape.block, order.lanes_of(positions)
    for lane in range(shape.lanes):
        own = lane_blocks(n, 7, lane, block=shape.block, lanes=shape.lanes)
        assert set(blocks[lanes == lane].tolist()) == set(own.tolist())


@settings(max_examples=50)
@given(n=st.integers(1, 600), shape=shapes, size=st.integers(1, 9), data=st.data())
def test_blocks_are_asked_for_before_they_are_read_and_not_twice(n, shape, size, data):
    order = order_of(n, shape)
    rank, start = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, n - 1))
    lanes = rank_lanes(rank, rank + 1, size=size, lanes=shape.lanes)
    positions = np.arange(start, n)
    mine = positions[np.isin(order.lanes_of(positions), lanes)]
    begun = order.turns_begun(start)
    asked = [*order.blocks(lanes, begun), *order.rest_blocks(lanes)]
    done, together = begun.stop, data.draw(st.integers(1, 4))
    blocks = order.samples_at(mine) // shape.block
    for position, block in zip(mine.tolist(), blocks.tolist(), strict=True):
        turns = range(done, max(done, order.turns_needed(position, together)))
        if turns:
            asked += order.blocks(lanes, turns).tolist()
        done = turns.stop
        assert block in asked
    assert len(set(asked)) == len(asked)


@settings(max_examples=50)
@given(n=st.integers(1, 5000), shape=shapes)
def test_the_blocks_between_first_and_last_use_fit_a_few_windows(n, shape):
    """What bounds memory: in a lane, at most two windows of turns are in use at a time."""
    order, positions = order_of(n, shape), np.arange(n)
    turns = n // shape.block // shape.lanes
    for position in positions[:: max(1, n // 50)].tolist():
        begun = order.turns_begun(position)
        if turns:
            assert len(begun) <= 2 * max(2 * shape.window, 1)


def test_order_of_a_release_is_kept_for_ever():
    # A checkpoint says where in the order a run stopped: another order would repeat samples.
    small = order_of(60, WindowShape(block=4, window=2, lanes=3)).samples_at(np.arange(60))
    assert small.tolist() == SMALL_ORDER
    large = order_of(10**12, WindowShape(block=16, window=32, lanes=256)).samples_at(np.arange(8))
    assert large.tolist() == LARGE_ORDER
    assert lane_blocks(60, 1, 2, block=4, lanes=3).tolist() == LANE


SMALL_ORDER = [
    32,
    48,
    52,
    34,
    40,
    58,
    26,
    13,
    57,
    25,
    42,
    23,
    1,
    15,
    20,
    3,
    14,
    21,
    35,
    12,
    59,
    0,
    49,
    22,
    33,
    41,
    54,
    2,
    43,
    53,
    24,
    51,
    56,
    27,
    50,
    55,
    38,
    28,
    17,
    7,
    10,
    18,
    4,
    30,
    46,
    6,
    9,
    45,
    37,
    8,
    19,
    5,
    11,
    44,
    36,
    31,
    16,
    39,
    29,
    47,
]
LARGE_ORDER = [
    859690830583,
    89841506892,
    242293605319,
    382786023057,
    99712687875,
    678739553190,
    94925926504,
    322568101062,
]
LANE = [13, 14, 4, 11, 5]


def test_seed_and_epoch_and_nothing_else_change_the_order():
    def first(seed, epoch):
        shape = WindowShape(block=4, window=8, lanes=16)
        return tuple(order_of(10**6, shape, seed, epoch).samples_at(np.arange(100)).tolist())

    assert first(1, 2) == first(1, 2)
    assert len({first(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


@pytest.mark.parametrize("sample_bytes", [3_000, 60_000])
def test_class_sorted_samples_are_mixed_nearly_as_by_a_drawn_permutation(sample_bytes):
    n, num_classes, batch = 1_281_167, 1000, 256
    order = order_of(n, WindowShape.of(batch, sample_bytes, 16))
    # Also at the end of the epoch, where blocks that do not go round the lanes could gather.
    positions = np.concatenate([np.arange(100 * batch), np.arange(n - 100 * batch, n)])
    labels = (order.samples_at(positions) * num_classes // n).reshape(-1, batch)
    distinct = [len(np.unique(some)) for some in labels]
    assert np.mean(distinct[:100]) > 223
    assert np.mean(distinct[100:]) > 223
    assert min(distinct) > 190


@pytest.mark.parametrize("global_batch", [1, 2, 31, 256, 1000, 1031, 4096, 65536])
@pytest.mark.parametrize(("sample_bytes", "block_size"), [(4, 16), (3072, 16), (99_999, 64)])
def test_the_default_shape_mixes_many_blocks_of_whole_reads(
    global_batch, sample_bytes, block_size
):
    shape = WindowShape.of(global_batch, sample_bytes, block_size)
    assert shape.lanes * shape.window >= 32 * max(global_batch, 256)
    assert shape.block % block_size == 0
    assert shape.block * sample_bytes >= 64 * KIB
    assert min(global_batch, 512) <= shape.lanes <= 1024


@pytest.mark.parametrize("wrong", ["block", "window", "lanes"])
def test_a_shape_of_nothing_is_told(wrong):
    with pytest.raises(DataError, match="positive"):
        WindowShape(**{"block": 1, "window": 1, "lanes": 1, wrong: 0})


def test_arguments_out_of_range_are_told():
    with pytest.raises(DataError, match="got n=0"):
        window_order(0, 0, 0, block=1, window=1, lanes=1)
