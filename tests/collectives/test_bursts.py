"""Check many small tensors in place, in repeated and in changing steps."""

import random
import time

import pytest
import torch

from hpctrain.core.errors import ConfigError

SIZES = pytest.mark.ranks(1, 2, 3, 4)

NUM_TENSORS = 40


def summed(hvd, tensors, order, **arguments):
    """Sum tensors in place, submitted in the given order; the number of a tensor is its name."""
    handles = {
        number: hvd.allreduce_async_(tensors[number], name=f"{number}", op=hvd.Sum, **arguments)
        for number in order
    }
    return [hvd.synchronize(handles[number]) for number in sorted(handles)]


def filled(hvd, numels, step):
    """Make tensors whose sums depend on the step and on the number of the tensor."""
    return [
        torch.full((numel,), float(1000 * step + number)) + hvd.rank()
        for number, numel in enumerate(numels)
    ]


def check(hvd, tensors, step, numbers):
    of_ranks = sum(range(hvd.size()))
    for number in numbers:
        expected = (1000 * step + number) * hvd.size() + of_ranks
        assert bool((tensors[number] == expected).all()), (step, number)


@SIZES
@pytest.mark.parametrize("numel", [3, 5000], ids=["in private memory", "in node memory"])
def test_bursts_give_their_sums_in_any_order_and_number(hvd, numel):
    shuffle = random.Random(hvd.rank()).shuffle
    together = random.Random(7)  # the same on all ranks
    numels = [numel + number % 3 for number in range(NUM_TENSORS)]
    order = list(range(NUM_TENSORS))
    for step in range(8):
        if step % 3 == 2:
            shuffle(order)
        some = order
        if step > 4:
            chosen = set(together.sample(range(NUM_TENSORS), 25))
            some = [number for number in order if number in chosen]
        tensors = filled(hvd, numels, step)
        given = [tensors[number] for number in sorted(some)]
        results = summed(hvd, tensors, some)
        assert all(result is mine for result, mine in zip(results, given, strict=True))
        check(hvd, tensors, step, some)


@SIZES
def test_name_may_be_reused_with_another_tensor(hvd):
    numels = [4000] * NUM_TENSORS
    order = range(NUM_TENSORS)
    for step, dtype in enumerate((torch.float32, torch.float64, torch.float32, torch.int32)):
        numels[step] += 1
        tensors = [tensor.to(dtype) for tensor in filled(hvd, numels, step)]
        summed(hvd, tensors, order)
        check(hvd, tensors, step, order)
    tensors = filled(hvd, numels, 9)
    for number in order:
        tensors[number] = tensors[number].view(1, -1).t()  # other strides
    summed(hvd, tensors, order)
    check(hvd, tensors, 9, order)
    with pytest.raises(ConfigError, match="dense"):
        hvd.allreduce_async_(torch.eye(2).to_sparse(), name="0", op=hvd.Sum)
    with pytest.raises(ConfigError, match="operations must get tensors"):
        hvd.allreduce_async_([1.0], name="0", op=hvd.Sum)
    with pytest.raises(ConfigError, match="elements do not share memory"):
        hvd.allreduce_async_(tensors[0][:1].expand(tensors[0].shape), name="0", op=hvd.Sum)


@SIZES
def test_repeated_bursts_are_correct_after_names_were_reused(hvd):
    numels, order = [20] * NUM_TENSORS, range(NUM_TENSORS)
    for step in range(6):
        tensors = filled(hvd, numels, step)
        handles = []
        for number in order:
            handles.append(hvd.allreduce_async_(tensors[number], name=f"{number}", op=hvd.Sum))
            if step == 4 and hvd.rank() % 2:  # announced singly here, together on other ranks
                time.sleep(0.001)
        for handle in handles:
            hvd.synchronize(handle)
        check(hvd, tensors, step, order)
        if step == 3:  # from here on, the numbers name other tensors
            ones = torch.ones(3, dtype=torch.float64)
            handles = [hvd.allreduce_async(ones, name=f"{n}", op=hvd.Max) for n in order]
            assert all(bool((hvd.synchronize(handle) == 1).all()) for handle in handles)
