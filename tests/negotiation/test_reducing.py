"""Scale factors and averages; integer averages are exact and rounded towards zero."""

import pytest
import torch

from hpctrain.comm.ops import Op, combination
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.negotiation.reducing import recipe, reduce_, reduce_scatter
from hpctrain.negotiation.request import Average, Sum


def lanes_of(tensor):
    return tensor.view(combination(tensor.dtype, Op.SUM).storage_dtype)


class Echo(SerialCommunicator):
    """A communicator of ``size`` ranks with identical tensors."""

    def __init__(self, size):
        self.size = size

    def allreduce_(self, tensor, *, scale=None, **_):
        total = tensor.clone()
        for _ in range(self.size - 1):
            combination(tensor.dtype, Op.SUM).into(lanes_of(total), lanes_of(tensor))
        tensor.copy_(total)
        return super().allreduce_(tensor, scale=scale)

    def reduce_scatter(self, tensor, *, scale=None, numels=None, **_):
        flat = tensor.reshape(-1).clone()
        self.allreduce_(flat, scale=scale).wait()
        return flat[: numels[0]]


def reduced(values, op, size, prescale=1.0, postscale=1.0):
    how = recipe(values.dtype, op, prescale, postscale, size)
    result = values.clone()
    reduce_(Echo(size), result, how)
    before = values.clone()
    part = reduce_scatter(Echo(size), values, [values.numel()] + [0] * (size - 1), how)
    assert torch.equal(part, result)
    assert torch.equal(values, before)
    return result


SMALL = (torch.int8, torch.uint8, torch.int16, torch.uint16)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_the_average_of_equal_integers_is_that_integer(dtype):
    info = torch.iinfo(dtype)
    values = torch.tensor([info.min, 0, 7, info.max], dtype=dtype)
    for size in (1, 2, 3, 49):
        assert torch.equal(reduced(values, Average, size), values)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_averages_of_wide_integers_are_exact(dtype):
    top = torch.iinfo(dtype).max // 49
    values = torch.tensor([0, 1, 7, top], dtype=dtype)
    assert torch.equal(reduced(values, Average, 49), values)


def test_averages_of_uint64_use_all_bits():
    values = torch.tensor([0, 5, 2**63 - 1, (2**64 - 1) // 2], dtype=torch.uint64)
    how = recipe(torch.uint64, Average, 1.0, 1.0, 2)
    doubled = torch.tensor([1, 11, 2**64 - 1, 2**64 - 2], dtype=torch.uint64)

    class Given(SerialCommunicator):
        size = 2

        def allreduce_(self, tensor, **_):
            tensor.copy_(doubled)
            return super().allreduce_(tensor)

    result = values.clone()
    reduce_(Given(), result, how)
    assert result.tolist() == [0, 5, 2**63 - 1, 2**63 - 1]


def test_averages_and_factors_of_integers_are_rounded_towards_zero():
    values = torch.tensor([-7, 7, 3])
    assert reduced(values, Sum, 1, prescale=0.5).tolist() == [-3, 3, 1]
    assert reduced(values, Sum, 3, prescale=0.5).tolist() == [-9, 9, 3]
    assert reduced(values, Sum, 3, postscale=0.5).tolist() == [-10, 10, 4]
    assert reduced(values, Average, 3, postscale=0.5).tolist() == [-3, 3, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_prescale_factor_is_applied_before_the_sum(dtype):
    values = torch.tensor([3.0, -1.0, 1e30], dtype=dtype)
    expected = (values * 0.3) * 2
    assert torch.equal(reduced(values, Sum, 2, prescale=0.3), expected)
    top = torch.tensor([torch.finfo(dtype).max], dtype=dtype)
    assert bool(reduced(top, Sum, 2, prescale=0.25, postscale=2.0).isfinite())
