"""Check that each sample occurs once per epoch, in equal global batches on any number of ranks."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data.loader import Loader
from hpctrain.data.order.window import WindowOrder, WindowShape
from hpctrain.data.samples import Ragged
from hpctrain.data.steps import Division, Steps
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


@settings(max_examples=30)
@given(
    n=SAMPLES,
    size=st.integers(1, 7),
    batch=st.integers(1, 120),
    epoch=st.integers(0, 3),
    order=ORDERS,
)
def test_an_epoch_has_every_sample_once_in_the_same_global_batches_for_any_ranks(
    n, size, batch, epoch, order
):
    def steps_of(size):
        loaders = [
            Loader(InMemory(n), global_batch=batch, rank=rank, size=size, **order)
            for rank in range(size)
        ]
        for loader in loaders:
            loader.set_epoch(epoch)
        return len(loaders[0]), list(zip(*loaders, strict=True))

    length, many = steps_of(size)
    _, alone = steps_of(1)
    assert length == len(many) == -(-n // batch)
    for ranks, (whole,) in zip(many, alone, strict=True):
        counts = [b.num_samples for b in ranks]
        assert max(counts) - min(counts) <= 1
        assert counts == [len(b.number) for b in ranks]
        joined = list(itertools.chain(*(b.number.tolist() for b in ranks)))
        assert joined == whole.number.tolist()
    assert sorted(itertools.chain(*(b.number.tolist() for (b,) in alone))) == list(range(n))


@settings(max_examples=25)
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


def test_read_samples_were_requested_once():
    orders = ({"order": "global"}, {"window": WindowShape(block=4, window=2, lanes=6)})
    for order, sample_bytes in itertools.product(orders, (120_000.0, 600_000.0)):
        dataset = InMemory(480, sample_bytes=sample_bytes)
        loader = Loader(dataset, global_batch=12, rank=1, size=3, **order)
        taken = set(itertools.chain(*numbers(loader)))
        asked = np.concatenate(dataset.asked).tolist()
        assert len(set(asked)) == len(asked)
        assert len(taken - set(asked)) == 4  # the first step is read at once


def test_epochs_and_seeds_have_different_orders():
    loader = Loader(InMemory(64), global_batch=16)
    first, second = numbers(loader), numbers(loader)
    assert first != second
    loader.set_epoch(0)
    assert numbers(loader) == first != numbers(Loader(InMemory(64), global_batch=16, seed=2))


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


def test_different_lengths_are_returned_packed_or_padded():
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
    with pytest.raises(AttributeError, match="one of image, number, got 'label'"):
        _ = batch.label


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"global_batch": 0}, "global_batch"),
        ({"prefetch": 0}, "prefetch"),
        ({"threads": 0}, "threads"),
        ({"workers": -1}, "workers"),
        ({"worker_timeout_s": 0.0}, "worker_timeout_s must be above 0"),
        ({"worker_timeout_s": float("nan")}, "worker_timeout_s must be above 0"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"tail": "long"}, "short, drop"),
        ({"ragged": "list"}, "packed, padded"),
        ({"order": "random"}, "global, window or sequential"),
        ({"order": "global", "window": WindowShape(block=1, window=1, lanes=1)}, "window="),
        ({"tail": "drop", "global_batch": 32}, "at least one step"),
        ({"on_corrupt": "ignore"}, "raise, skip"),
        ({"on_corrupt": "skip"}, "must be used with comm"),
        ({"micro_shards": 1}, "micro_shards = 1 on 2 ranks"),
        ({"micro_shards": 2, "on_corrupt": "skip"}, "must be 'raise' with micro_shards"),
    ],
)
def test_wrong_arguments_raise(wrong, words):
    with pytest.raises(DataError, match=words):
        Loader(InMemory(31), **{"global_batch": 4, "rank": 0, "size": 2, **wrong})


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 1500), batch=st.integers(1, 12), size=st.integers(1, 4), data=st.data())
def test_each_sample_is_asked_for_once_and_before_it_is_read(n, batch, size, data):
    block, window = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    lanes = data.draw(st.integers(1, batch))
    order = WindowOrder(n, 1, 0, WindowShape(block=block, window=window, lanes=lanes))
    rank, start = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, n - 1))
    division = Division(global_batch=batch, rank=rank, size=size)
    steps = Steps(order, division, range(start, n))
    asked = steps.samples(0).tolist()
    for number in range(len(steps)):
        asked += steps.soon(number).tolist()
        assert set(steps.samples(number).tolist()) <= {*asked}
    assert len(set(asked)) == len(asked)
