"""Check reading ahead: order, limits, and random numbers of transforms per sample."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data.loader import Loader
from hpctrain.data.samples import Ragged
from hpctrain.data.transform import PerSample
from hpctrain.data.workers.pool import _Task
from tests.data.memory import InMemory
from tests.processes import wait_until


def first(transform):
    """Return the first batch of four transformed samples."""
    return next(iter(Loader(InMemory(4), global_batch=4, order="sequential", transform=transform)))


def test_a_transform_makes_the_fields_of_a_batch_and_a_function_of_a_sample_any_lengths():
    (twice,) = first(lambda fields: {"twice": 2 * fields["number"]})
    assert twice.tolist() == [0, 2, 4, 6]
    (copies,) = first(PerSample(lambda s: {"copies": s["number"].repeat(int(s["number"]))}))
    assert isinstance(copies, Ragged)
    assert copies.values.tolist() == [1, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (
            PerSample(lambda s: {"x": torch.zeros(1, int(s["number"]))}),
            "except the first",
        ),
        (PerSample(lambda s: {f"x{s['number']}": 1}), "the same fields"),
        (lambda fields: fields["number"], "tensors by field"),
    ],
)
def test_unsupported_values_of_a_batch_raise(transform, words):
    with pytest.raises(DataError, match=words):
        first(transform)


def test_random_numbers_without_a_loader_are_an_error():
    with pytest.raises(DataError, match="pass it to a Loader"):
        PerSample(noisy, random=True)(InMemory(4).take([1]))


def noisy(sample, generator):
    return {"number": sample["number"], "noise": generator.standard_normal(2)}


@settings(max_examples=20)
@given(size=st.integers(1, 5), batch=st.integers(1, 40), epoch=st.integers(0, 2))
def test_random_numbers_of_a_sample_depend_on_seed_epoch_and_sample_only(size, batch, epoch):
    def drawn(size, batch):
        found = {}
        for rank in range(size):
            loader = Loader(
                InMemory(31),
                global_batch=batch,
                rank=rank,
                size=size,
                seed=3,
                transform=PerSample(noisy, random=True),
            )
            loader.set_epoch(epoch)
            for b in loader:
                if b.num_samples:
                    found |= zip(b.number.tolist(), map(tuple, b.noise.tolist()), strict=True)
        return found

    alone = drawn(1, 31)
    assert drawn(size, batch) == alone
    assert len(set(alone.values())) == 31


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("hpctrain-loader")]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failure_while_reading_is_raised_at_its_step(threads):
    def fail_on_sample_20(fields):
        if 20 in fields["number"]:
            raise KeyError("sample 20")
        return fields

    loader = Loader(
        InMemory(31),
        global_batch=8,
        order="sequential",
        transform=fail_on_sample_20,
        threads=threads,
    )
    batches = iter(loader)
    assert [next(batches).number[0].item() for _ in range(2)] == [0, 8]
    with pytest.raises(KeyError, match="sample 20"):
        next(batches)
    assert not readers()
    assert loader.consumed == 16
    with pytest.raises(KeyError, match="sample 20"):
        next(iter(loader))


def test_reading_ahead_is_bounded_and_ends_with_its_consumer():
    reads = []
    loader = Loader(
        InMemory(97),
        global_batch=1,
        prefetch=3,
        threads=2,
        transform=lambda fields: reads.append(1) or fields,
    )
    batches = iter(loader)
    next(batches)
    assert len(readers()) == 2
    wait_until(lambda: len(reads) >= 4, 10)
    time.sleep(0.05)
    assert len(reads) == 4
    batches.close()
    assert not readers()


def test_another_pass_ends_the_one_before():
    loader = Loader(InMemory(97), global_batch=10)
    first = iter(loader)
    next(first)
    assert next(iter(loader)).num_samples == 10
    with pytest.raises(DataError, match="must not be used after another iter"):
        next(first)
    state = loader.state_dict()
    for change in (lambda: loader.set_epoch(3), lambda: loader.load_state_dict(state)):
        batches = iter(loader)
        next(batches)
        change()
        with pytest.raises(DataError, match="set_epoch"):
            next(batches)
    assert not readers()


def test_worker_processes_give_the_same_batches(dataset_of):
    def batches(**kwargs):
        loader = Loader(dataset_of(31), global_batch=8, transform=PerSample(seen), **kwargs)
        with loader:
            return [b.number.tolist() for _ in range(2) for b in loader]

    assert batches(workers=1) == batches()


def seen(sample):
    return {"number": 2 * sample["number"]}


DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": np.random.standard_normal,
    "random": random.random,
}


def whole(draw):
    return lambda fields: {**fields, "noise": torch.full((len(fields["number"]),), draw())}


def each(draw):
    return PerSample(lambda sample: {**sample, "noise": draw()})


@pytest.mark.parametrize("make", [whole, each])
@pytest.mark.parametrize("name", DRAWS)
def test_a_transform_in_threads_that_draws_from_a_global_generator_is_refused(name, make):
    loader = Loader(InMemory(31), global_batch=4, transform=make(DRAWS[name]))
    with pytest.raises(DataError, match=rf"global generator of {name}, .*random=True.*workers"):
        next(iter(loader))


def test_global_generator_is_rejected_in_a_later_pass():
    is_late = False
    loader = Loader(
        InMemory(31),
        global_batch=4,
        transform=lambda fields: whole(DRAWS["torch"])(fields) if is_late else fields,
    )
    assert len(list(loader)) == 8
    is_late = True
    with pytest.raises(DataError, match="global generator of torch"):
        list(loader)


def test_training_may_draw_random_numbers_between_batches():
    loader = Loader(InMemory(31), global_batch=4, transform=lambda fields: fields)
    for _ in range(3):
        assert len([[draw() for draw in DRAWS.values()] for _ in loader]) == 8


def test_training_may_draw_while_another_thread_waits_for_batches():
    """The transform waits until the main thread has drawn."""
    drawn, found = threading.Event(), []
    loader = Loader(InMemory(8), global_batch=4, transform=lambda fields: drawn.wait(9) and fields)
    consumer = threading.Thread(target=lambda: found.extend(loader))
    consumer.start()
    for draw in DRAWS.values():
        draw()
    drawn.set()
    consumer.join()
    assert len(found) == 2


@pytest.mark.parametrize("name", [*DRAWS, "own"])
def test_in_processes_a_sample_has_its_numbers_whatever_is_transformed_with_it(name):
    own = PerSample(lambda s, generator: {**s, "noise": generator.random()}, random=True)
    task = _Task(InMemory(31), own if name == "own" else each(DRAWS[name]))
    many = task(np.array([7, 3, 5]), 1, 2)["noise"]
    assert len(set(many.tolist())) == 3
    assert task(np.array([3]), 1, 2)["noise"].item() == many[1]
    assert task(np.array([3]), 2, 2)["noise"].item() != many[1]


def test_transforms_that_depend_on_the_number_of_ranks_are_rejected_for_micro_shards():
    task = _Task(InMemory(31), whole(DRAWS["torch"]), any_ranks=True)
    with pytest.raises(DataError, match="depend on the number of ranks"):
        task(np.array([3]), 1, 2)
    assert _Task(InMemory(31), lambda fields: fields, any_ranks=True)(np.array([3]), 1, 2)
