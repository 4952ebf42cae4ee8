"""Every sample once per epoch, the same global batches for any number of ranks."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data.loader import Loader
from hpctrain.data.loading.batches import ReadDepth
from hpctrain.data.order.window import WindowShape
from hpctrain.data.ragged import Ragged
from tests.data.memory import InMemory, numbers

SAMPLES = st.sampled_from([1, 2, 5, 31, 64, 97])
ORDERS = st.sampled_from(
    [
        {"order": "global"},
        {"order": "sequential"},
        {"window": WindowShape(block=4, window=2, lanes=3)},
        {"window": WindowShape(block=3, window=1, lanes=8)},
    ]
)


def epoch_of(dataset, size, **kwargs):
    """Return the batches of all ranks: ``[step][rank]`` lists of sample numbers."""
    ranks = [numbers(Loader(dataset, rank=rank, size=size, **kwargs)) for rank in range(size)]
    return list(zip(*ranks, strict=True))


@settings(max_examples=50)
@given(
    n=SAMPLES,
    size=st.integers(1, 7),
    batch=st.integers(1, 120),
    epoch=st.integers(0, 3),
    order=ORDERS,
)
def test_every_sample_comes_exactly_once_per_epoch(n, size, batch, epoch, order):
    seen = []
    for rank in range(size):
        loader = Loader(InMemory(n), global_batch=batch, rank=rank, size=size, **order)
        loader.set_epoch(epoch)
        steps = numbers(loader)
        assert len(steps) == len(loader) == -(-n // batch)
        seen += itertools.chain(*steps)
    assert sorted(seen) == list(range(n))


@settings(max_examples=50)
@given(n=SAMPLES, size=st.integers(2, 7), batch=st.integers(1, 120), order=ORDERS)
def test_global_batches_do_not_depend_on_the_number_of_ranks(n, size, batch, order):
    many = epoch_of(InMemory(n), size, global_batch=batch, **order)
    alone = epoch_of(InMemory(n), 1, global_batch=batch, **order)
    assert [list(itertools.chain(*step)) for step in many] == [step[0] for step in alone]


@settings(max_examples=50)
@given(n=SAMPLES, size=st.integers(1, 7), batch=st.integers(1, 120), order=ORDERS)
def test_counts_sum_to_the_global_batch_and_differ_by_one_at_most(n, size, batch, order):
    loaders = [
        Loader(InMemory(n), global_batch=batch, rank=rank, size=size, **order)
        for rank in range(size)
    ]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        counts = [b.num_samples for b in batches]
        assert sum(counts) == min(batch, n - step * batch)
        assert max(counts) - min(counts) <= 1
        assert counts == [len(b.number) for b in batches]


@settings(max_examples=50)
@given(
    n=SAMPLES,
    shards=st.sampled_from([1, 4, 8]),
    batch=st.integers(1, 120),
    order=ORDERS,
    data=st.data(),
)
def test_micro_shards_do_not_depend_on_the_number_of_ranks(n, shards, batch, order, data):
    size = data.draw(st.integers(1, shards))
    how = {"global_batch": batch, **order}
    every = epoch_of(InMemory(n), shards, **how)  # one rank for each
    loaders = [
        Loader(InMemory(n), rank=rank, size=size, micro_shards=shards, **how)
        for rank in range(size)
    ]
    cuts = [shards * rank // size for rank in range(size + 1)]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        for found, (first, last) in zip(batches, itertools.pairwise(cuts), strict=True):
            assert found.number.tolist() == list(itertools.chain(*every[step][first:last]))
        assert {loader.step_samples for loader in loaders} == {min(batch, n - step * batch)}


@settings(max_examples=50)
@given(n=SAMPLES, size=st.integers(1, 7), batch=st.integers(1, 120), order=ORDERS)
def test_a_tail_that_wraps_fills_every_step_and_marks_repeats(n, size, batch, order):
    ranks = [
        list(Loader(InMemory(n), global_batch=batch, rank=rank, size=size, tail="wrap", **order))
        for rank in range(size)
    ]
    first, repeated = [], []
    for step in zip(*ranks, strict=True):
        assert sum(b.num_samples for b in step) == batch
        for b in step:
            split = b.num_samples - b.num_repeated
            first += b.number[:split].tolist()
            repeated += b.number[split:].tolist()
    assert sorted(first) == list(range(n))
    assert len(repeated) == -n % batch


def test_drop_leaves_out_the_short_step_only():
    kept = epoch_of(InMemory(97), 3, global_batch=10, tail="drop")
    assert len(kept) == 9
    assert kept == epoch_of(InMemory(97), 3, global_batch=10, tail="short")[:9]


def test_a_rank_reads_whole_lanes_in_every_epoch():
    shape = WindowShape(block=4, window=2, lanes=6)
    blocks = []
    for epoch in range(3):
        loader = Loader(InMemory(480), global_batch=12, rank=1, size=3, window=shape)
        loader.set_epoch(epoch)
        blocks.append({number // 4 for number in itertools.chain(*numbers(loader))})
    assert blocks[0] == blocks[1] == blocks[2]
    assert len(blocks[0]) == 480 // 4 // 3


def test_what_is_read_was_asked_for_once():
    orders = ({"order": "global"}, {"window": WindowShape(block=4, window=2, lanes=6)})
    for order, sample_bytes in itertools.product(orders, (120_000.0, 600_000.0)):
        dataset = InMemory(480, sample_bytes=sample_bytes)
        loader = Loader(dataset, global_batch=12, rank=1, size=3, **order)
        taken = set(itertools.chain(*numbers(loader)))
        asked = np.concatenate(dataset.asked).tolist()
        assert len(set(asked)) == len(asked)
        # What comes first of single samples is read at once, four of each step.
        first = 4 * ReadDepth.of(4 * sample_bytes, threads=4, prefetch=4).together
        assert len(taken - set(asked)) <= (first if "order" in order else 0)


def test_samples_come_with_their_own_values(dataset_of):
    for image, number in Loader(dataset_of(97), global_batch=13, rank=1, size=2):
        assert np.array_equal(image[:, -1, -1], number)


def test_a_complete_pass_moves_on_to_the_next_epoch():
    loader = Loader(InMemory(64), global_batch=16)
    first, second = numbers(loader), numbers(loader)
    assert first != second
    loader.set_epoch(0)
    assert numbers(loader) == first


def test_seed_chooses_the_order():
    first, same, other = (
        epoch_of(InMemory(64), 1, global_batch=16, seed=seed) for seed in (1, 1, 2)
    )
    assert first == same != other


def test_sequential_samples_come_as_they_lie():
    steps = epoch_of(InMemory(5), 1, global_batch=2, order="sequential")
    assert steps == [([0, 1],), ([2, 3],), ([4],)]


@pytest.mark.parametrize(
    ("num_samples", "sample_bytes", "name"),
    [
        (1_281_167, 3_000.0, "window"),
        (1_281_167, 110_000.0, "global"),
        (60_000, 784.0, "global"),
        (200_000, 9_000.0, "window"),
    ],
)
def test_small_samples_of_a_large_set_are_read_by_blocks(num_samples, sample_bytes, name):
    dataset = InMemory(num_samples, sample_bytes=sample_bytes)
    assert Loader(dataset, global_batch=256).state_dict()["order"] == name


def test_steps_are_delivered_in_order_whatever_their_duration():
    dataset = InMemory(97, slow_s=0.002)
    steps = numbers(Loader(dataset, global_batch=3, prefetch=7, threads=5, order="sequential"))
    assert list(itertools.chain(*steps)) == list(range(97))


def test_lengths_that_differ_come_packed_or_padded():
    packed = next(iter(Loader(InMemory(7), global_batch=7, order="sequential")))
    assert isinstance(packed.tokens, Ragged)
    assert packed.tokens.values.tolist() == [1, 2, 2, 4, 5, 5]
    loader = Loader(InMemory(7), global_batch=7, order="sequential", ragged="padded")
    padded = next(iter(loader))
    assert padded.tokens[:3].tolist() == [[0, 0], [1, 0], [2, 2]]
    assert padded.tokens_lengths.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_batch_is_a_tuple_a_mapping_and_a_record(dataset_of):
    batch = next(iter(Loader(dataset_of(31), global_batch=8)))
    image, number = batch
    assert batch["image"] is batch.image is image
    assert batch["number"] is batch.number is number
    assert pickle.loads(pickle.dumps(batch)).num_samples == 8
    assert batch.to(torch.device("cpu"), non_blocking=True).num_samples == 8
    with pytest.raises(AttributeError, match="no field 'label'"):
        _ = batch.label


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"global_batch": 0}, "global_batch"),
        ({"prefetch": 0}, "prefetch"),
        ({"threads": 0}, "threads"),
        ({"workers": -1}, "workers"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"tail": "long"}, "short, drop, wrap"),
        ({"ragged": "list"}, "packed, padded"),
        ({"order": "random"}, "global, window or sequential"),
        ({"order": "global", "window": WindowShape(block=1, window=1, lanes=1)}, "window="),
        ({"tail": "drop", "global_batch": 32}, "no step"),
        ({"on_corrupt": "ignore"}, "raise, skip"),
        ({"on_corrupt": "skip"}, "needs comm"),
        ({"micro_shards": 1}, "micro_shards = 1 on 2 ranks"),
        ({"micro_shards": 2, "tail": "wrap"}, "fixed parts of a global batch"),
        ({"micro_shards": 2, "on_corrupt": "skip"}, "fixed parts of a global batch"),
    ],
)
def test_wrong_arguments_are_told(wrong, words):
    with pytest.raises(DataError, match=words):
        Loader(InMemory(31), **{"global_batch": 4, "rank": 0, "size": 2, **wrong})
