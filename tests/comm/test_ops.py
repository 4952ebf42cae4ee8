"""Compare the combination of two tensors, for each dtype and operation, with exact arithmetic."""

import numpy as np
import pytest
import torch

from hpctrain.comm.ops import Op, combination, scale_
from hpctrain.core.errors import CommError
from tests.comm.fuzz_values import COMPLEX, EIGHTHS, FLOATS, FUNCTIONS, INTEGERS, crc, ops_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # NaN is intended
]

INTEGRAL = (*INTEGERS, torch.bool)
FLOATING = (*FLOATS, *EIGHTHS)


def pairs(dtypes):
    return [
        pytest.param(dtype, op, id=f"{dtype}-{op.name}".removeprefix("torch."))
        for dtype in dtypes
        for op in ops_of(dtype)
    ]


def random(dtype, numel=2001, seed=0):
    source = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(source.integers(0, 2, numel, np.uint8)).bool()
    raw = source.integers(0, 256, numel * dtype.itemsize, np.uint8)
    if dtype in INTEGERS:
        return torch.from_numpy(raw).view(dtype)
    if dtype in COMPLEX:
        return torch.from_numpy(source.normal(size=2 * numel)).to(COMPLEX[dtype]).view(dtype)
    values = torch.from_numpy(source.normal(size=numel)).to(dtype)
    values[:20] = torch.tensor([np.nan, 0.0, -0.0, 1.0, -1.0] * 4).to(dtype)
    return values


def combine(how, first, second):
    """Combine with all dtypes of the arguments, and assert equal bits (all NaN count as equal)."""
    total, other = first.clone().view(how.storage_dtype), second.view(how.storage_dtype)
    how.into(total, other)
    for wide_total, wide_other in ((True, False), (True, True), (False, True)):
        dtype = how.accumulate_dtype if wide_total else how.storage_dtype
        again = how.view(first).to(dtype, copy=True)
        how.into(again, other.to(how.accumulate_dtype) if wide_other else other)
        assert crc(again.to(how.storage_dtype)) == crc(total)
    if how.storage_dtype is how.accumulate_dtype:
        out = torch.empty_like(total)
        how.function(first.view(how.storage_dtype), other, out=out)
        assert crc(out) == crc(total)
        out.copy_(other)
        how.function(first.view(how.storage_dtype), out, out=out)
        assert crc(out) == crc(total)
    return total.view(first.dtype)


@pytest.mark.parametrize(("dtype", "op"), pairs(INTEGRAL))
def test_integers_and_bool_are_combined_as_in_numpy(dtype, op):
    first, second = random(dtype, seed=1), random(dtype, seed=2)
    result = combine(combination(dtype, op), first, second)
    np.testing.assert_array_equal(result.numpy(), FUNCTIONS[op](first.numpy(), second.numpy()))


@pytest.mark.parametrize(("dtype", "op"), pairs(FLOATING))
def test_floats_are_combined_exactly_and_rounded_once(dtype, op):
    first, second = random(dtype, seed=1), random(dtype, seed=2)
    result = combine(combination(dtype, op), first, second)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    exact = FUNCTIONS[op](first.to(wide).numpy(), second.to(wide).numpy())
    expected = torch.from_numpy(exact).to(dtype).to(wide).numpy()
    np.testing.assert_array_equal(result.to(wide).numpy(), expected)


@pytest.mark.parametrize(("dtype", "op"), pairs(COMPLEX))
def test_complex_numbers_are_combined_as_in_numpy(dtype, op):
    first, second = random(dtype, seed=1), random(dtype, seed=2)
    result = combine(combination(dtype, op), first, second).to(torch.complex128).numpy()
    exact = FUNCTIONS[op](first.to(torch.complex128).numpy(), second.to(torch.complex128).numpy())
    np.testing.assert_allclose(result, exact, atol=20 * torch.finfo(COMPLEX[dtype]).eps)


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHTHS], ids=str)
def test_nan_is_propagated_from_either_operand(dtype):
    nan, one = torch.tensor([np.nan]).to(dtype), torch.ones(1).to(dtype)
    for op in ops_of(dtype):
        for first, second in ((nan, one), (one, nan), (nan, nan)):
            assert combine(combination(dtype, op), first, second).float().isnan().all()


def test_many_halves_are_summed_in_single_precision():
    for dtype in (torch.float16, torch.bfloat16, *EIGHTHS, torch.complex32):
        how = combination(dtype, Op.SUM)
        assert how.accumulate_dtype is torch.float32
        total = torch.full((3,), 16.0)
        small = torch.full((3,), 0.25).to(how.storage_dtype)
        for _ in range(8):  # added singly, each is lost: 16.25 is 16 in float8_e4m3fn
            how.into(total, small)
        assert total.tolist() == [18.0] * 3


def test_float8_e8m0fnu_is_combined():
    first = torch.tensor([1.0, 4.0]).to(torch.float8_e8m0fnu)
    second = torch.tensor([4.0, 2.0]).to(first.dtype)
    for op, expected in (
        (Op.PRODUCT, [4.0, 8.0]),
        (Op.MIN, [1.0, 2.0]),
        (Op.MAX, [4.0, 4.0]),
    ):
        total = first.clone()
        combination(first.dtype, op).into(total, second)
        assert total.float().tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "op", "message"),
    [
        (torch.complex64, Op.MIN, "min must be of ordered values, got complex64; use view"),
        (torch.float32, Op.BAND, "bitwise and must be of integers or bool, got float32; view it"),
        (torch.complex64, Op.BXOR, "bitwise xor must be of integers or bool, got complex64"),
        (torch.qint8, Op.SUM, "sum over ranks must be of numbers or bool, got qint8; convert"),
        (torch.bits8, Op.BOR, "bitwise or over ranks must be of numbers or bool, got bits8"),
        (torch.float4_e2m1fn_x2, Op.MAX, "max over ranks must be of numbers or bool, got float4"),
    ],
)
def test_undefined_combinations_are_rejected(dtype, op, message):
    with pytest.raises(CommError, match=message):
        combination(dtype, op)


@pytest.mark.parametrize("dtype", [*FLOATING, *COMPLEX], ids=str)
def test_scaling_rounds_once(dtype):
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.tensor([1.0, 3.0, -7.0]).to(dtype)
    expected = (values.to(wide) * 0.5).to(dtype)
    scale_(values, 0.5)
    assert crc(values) == crc(expected)
