"""Every sample once per epoch, the same global batches for any number of ranks."""

import itertools
import pickle
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.loader import Loader, share
from hpctrain.errors import DataError

SAMPLES = st.sampled_from([1, 2, 5, 31, 64, 97])


def epoch_of(dataset, size, **kwargs):
    """Return the batches of all ranks: ``[step][rank]`` lists of sample numbers."""
    ranks = [Loader(dataset, rank=rank, size=size, **kwargs) for rank in range(size)]
    return [[b.number.tolist() for b in step] for step in zip(*ranks, strict=True)]


@given(n=SAMPLES, size=st.integers(1, 7), batch=st.integers(1, 120), epoch=st.integers(0, 3))
def test_every_sample_comes_exactly_once_per_epoch(dataset_of, n, size, batch, epoch):
    loaders = [
        Loader(dataset_of(n), global_batch=batch, rank=rank, size=size) for rank in range(size)
    ]
    seen = []
    for loader in loaders:
        loader.set_epoch(epoch)
        assert len(loader) == -(-n // batch)
        seen += [number for b in loader for number in b.number.tolist()]
    assert sorted(seen) == list(range(n))


@given(n=SAMPLES, size=st.integers(2, 7), batch=st.integers(1, 120), shuffle=st.booleans())
def test_global_batches_do_not_depend_on_the_number_of_ranks(dataset_of, n, size, batch, shuffle):
    many = epoch_of(dataset_of(n), size, global_batch=batch, shuffle=shuffle)
    alone = epoch_of(dataset_of(n), 1, global_batch=batch, shuffle=shuffle)
    assert [list(itertools.chain(*step)) for step in many] == [step[0] for step in alone]


@given(n=SAMPLES, size=st.integers(1, 7), batch=st.integers(1, 120))
def test_counts_sum_to_the_global_batch_and_differ_by_one_at_most(dataset_of, n, size, batch):
    loaders = [
        Loader(dataset_of(n), global_batch=batch, rank=rank, size=size) for rank in range(size)
    ]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        counts = [b.num_samples for b in batches]
        assert sum(counts) == min(batch, n - step * batch)
        assert max(counts) - min(counts) <= 1
        assert counts == [len(b.image) for b in batches]


@given(start=st.integers(0, 10**12), total=st.integers(0, 10**12), size=st.integers(1, 2000))
def test_shares_join_to_the_whole(start, total, size):
    shares = [share(start, start + total, rank, size) for rank in range(min(size, 50))]
    assert shares[0].start == start
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))
    assert share(start, start + total, size - 1, size).stop == start + total


def test_drop_leaves_out_the_short_step_only(dataset_of):
    kept = epoch_of(dataset_of(97), 3, global_batch=10, tail="drop")
    assert len(kept) == 9
    assert kept == epoch_of(dataset_of(97), 3, global_batch=10, tail="short")[:9]


def test_samples_come_with_their_own_values(dataset_of):
    for image, number in Loader(dataset_of(97), global_batch=13, rank=1, size=2):
        assert np.array_equal(image[:, -1, -1], number)


def test_a_complete_pass_moves_on_to_the_next_epoch(dataset_of):
    loader = Loader(dataset_of(64), global_batch=16, rank=0, size=1)
    first, second = ([b.number.tolist() for b in loader] for _ in range(2))
    assert first != second
    loader.set_epoch(0)
    next(iter(loader))
    assert [b.number.tolist() for b in loader] == first


def test_seed_chooses_the_order(dataset_of):
    first, same, other = (
        epoch_of(dataset_of(64), 1, global_batch=16, seed=seed) for seed in (1, 1, 2)
    )
    assert first == same != other


def test_without_shuffle_samples_come_as_they_lie(dataset_of):
    steps = epoch_of(dataset_of(5), 1, global_batch=2, shuffle=False)
    assert steps == [[[0, 1]], [[2, 3]], [[4]]]


def test_a_transform_makes_the_fields_of_a_batch(dataset_of):
    loader = Loader(
        dataset_of(31),
        global_batch=8,
        rank=0,
        size=1,
        transform=lambda fields: {"twice": 2 * fields["number"]},
    )
    (twice,) = next(iter(loader))
    assert (twice % 2 == 0).all()


def test_a_failure_while_reading_is_raised_at_its_step(dataset_of):
    def fail_on_sample_20(fields):
        if 20 in fields["number"]:
            raise KeyError("sample 20")
        return fields

    loader = Loader(
        dataset_of(31),
        global_batch=8,
        rank=0,
        size=1,
        shuffle=False,
        transform=fail_on_sample_20,
    )
    batches = iter(loader)
    assert [next(batches).number[0].item() for _ in range(2)] == [0, 8]
    with pytest.raises(KeyError, match="sample 20"):
        next(batches)


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("hpctrain-loader")]


def test_reading_ahead_is_bounded_and_ends_with_its_consumer(dataset_of):
    reads = []
    loader = Loader(
        dataset_of(97),
        global_batch=1,
        rank=0,
        size=1,
        prefetch=3,
        transform=lambda fields: reads.append(1) or fields,
    )
    batches = iter(loader)
    next(batches)
    assert len(readers()) == 1
    deadline = time.monotonic() + 10
    while len(reads) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(reads) == 4
    batches.close()
    assert not readers()


def test_a_batch_is_a_tuple_a_mapping_and_a_record(dataset_of):
    batch = next(iter(Loader(dataset_of(31), global_batch=8, rank=0, size=1)))
    image, number = batch
    assert batch["image"] is batch.image is image
    assert batch["number"] is batch.number is number
    assert pickle.loads(pickle.dumps(batch)).num_samples == 8
    with pytest.raises(AttributeError, match="no field 'label'"):
        _ = batch.label


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"global_batch": 0}, "global_batch"),
        ({"prefetch": 0}, "prefetch"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"tail": "long"}, "short, drop"),
        ({"tail": "drop", "global_batch": 32}, "no step"),
    ],
)
def test_wrong_arguments_are_told(dataset_of, wrong, words):
    with pytest.raises(DataError, match=words):
        Loader(dataset_of(31), **{"global_batch": 4, "rank": 0, "size": 2, **wrong})
