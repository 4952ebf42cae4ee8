"""Check packed tensors: unpacking gives the same or summed values, with one call of torch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.bucket import TensorSpec, plan_buckets
from hpctrain.comm.tensor_bucket import PackedTensors, TensorBucket

FLOATS = (torch.float32, torch.float64, torch.float16)


def tensors(rank, dtype=torch.float32, *, only_flat=False):
    """Return tensors of several layouts, with different values on every rank."""
    numbers = torch.Generator().manual_seed(rank)
    flat = [torch.randint(-9, 9, (n,), generator=numbers).to(dtype) for n in (5, 0, 16, 1)]
    if only_flat:
        return flat
    grid = torch.randint(-9, 9, (3, 7), generator=numbers).to(dtype)
    images = torch.randint(-9, 9, (2, 3, 4, 5), generator=numbers).to(dtype)
    scalar = torch.randint(-9, 9, (), generator=numbers).to(dtype)
    return [*flat, grid.t(), scalar, images.to(memory_format=torch.channels_last)]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


class Calls(TorchDispatchMode):
    """Count the calls of operators."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("only_flat", [False, True])
@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize("keeps_strides", [False, True])
def test_unpacked_tensors_equal_packed_ones_with_one_call_each(
    only_flat, with_gaps, keeps_strides
):
    given = tensors(0, only_flat=only_flat)
    offsets = [200 * number for number in range(len(given))] if with_gaps else None
    flat = torch.full((200 * len(given) if with_gaps else sum(t.numel() for t in given),), -1.0)
    packed = PackedTensors(flat, given, offsets, keeps_strides=keeps_strides)
    with Calls() as calls:
        packed.pack(given)
    assert calls.num == 1
    assert same(packed.places, given)
    if keeps_strides:
        assert [p.stride() for p in packed.places] == [t.stride() for t in given]
    elif not with_gaps:  # in row-major order, without gaps
        assert torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in given]))
    taken = [torch.empty_like(tensor) for tensor in given]
    with Calls() as calls:
        packed.unpack(taken)
    assert calls.num == 1
    assert same(taken, given)


@pytest.mark.parametrize("dtype", FLOATS)
def test_copies_in_another_dtype_convert_the_values(dtype):
    given = tensors(1)
    packed = PackedTensors.copied(given, dtype)
    assert packed.flat.dtype is dtype
    assert same(packed.places, [tensor.to(dtype) for tensor in given])


def test_places_in_another_buffer_are_the_same_elements():
    given = tensors(2)
    packed = PackedTensors.copied(given)
    other = torch.cat([torch.zeros(3), packed.flat])[3:]
    assert same(packed.places_in(other), given)
    packed.places_in(other)[0].zero_()
    assert same(packed.places, given)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("num_marks", [0, 3])
def test_a_bucket_holds_the_sum_over_the_ranks_after_it_is_sent(world, comm, num_marks):
    mine = tensors(world.rank)
    specs = [TensorSpec(name=str(i), numel=t.numel(), dtype=t.dtype) for i, t in enumerate(mine)]
    (plan,) = plan_buckets(specs, None)
    memory = comm.new_bucket(plan.numel + num_marks, plan.dtype)
    bucket = TensorBucket(memory, mine, plan.offsets, num_marks=num_marks)
    bucket.pack(mine)
    bucket.marks.fill_(world.rank + 1)
    bucket.send(lambda one: comm.allreduce_(one).wait(), factor=2.0)
    taken = [torch.empty_like(tensor) for tensor in mine]
    bucket.unpack(taken)
    of_ranks = [tensors(rank) for rank in range(world.size)]
    assert same(taken, [2 * sum(each) for each in zip(*of_ranks, strict=True)])
    marks = [world.size * (world.size + 1) / 2] * num_marks  # the factor does not apply to marks
    assert bucket.marks.tolist() == marks
