"""Random numbers of transforms: those of the sample, or refused."""

import random
import threading

import numpy as np
import pytest
import torch

from hpctrain.core.errors import DataError
from hpctrain.data.loader import Loader
from hpctrain.data.transform import PerSample
from hpctrain.data.workers.pool import _Task
from tests.data.memory import InMemory

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


def test_it_is_refused_in_a_later_pass():
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


def test_who_trains_may_draw_between_batches():
    loader = Loader(InMemory(31), global_batch=4, transform=lambda fields: fields)
    for _ in range(3):
        assert len([[draw() for draw in DRAWS.values()] for _ in loader]) == 8


def test_who_trains_may_draw_while_another_thread_waits_for_batches():
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


def test_what_would_depend_on_the_number_of_ranks_is_refused_for_micro_shards():
    task = _Task(InMemory(31), whole(DRAWS["torch"]), any_ranks=True)
    with pytest.raises(DataError, match="another number of ranks"):
        task(np.array([3]), 1, 2)
    assert _Task(InMemory(31), lambda fields: fields, any_ranks=True)(np.array([3]), 1, 2)
