"""Two states are compared bit by bit, and the first difference is measured."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.tools import compare
from hpctrain.checkpoint.tools.compare import differences, plain_differences, plain_values

FLOATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip
OTHERS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.complex64, torch.complex128,
)  # fmt: skip


def one(a, b):
    (found,) = differences({"x": a}, {"x": b})
    return found


def ulp_between(a, b):
    """Count by stepping from one to the other: the plain form of what is tested."""
    steps = 0
    while a != b:
        a, steps = np.nextafter(a, b), steps + 1
    return steps


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_one_changed_element_is_found_and_measured(dtype):
    for shape in ((), (0,), (7,), (3, 4)):
        a = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        assert list(differences({"x": a}, {"x": a.clone()})) == []
    a = torch.zeros(3, 4).to(dtype)
    b = torch.zeros(3, 4)
    b[1, 2] = 1
    found = one(a, b.to(dtype))
    assert (found.what, found.num_different, found.first, found.max_abs) == (
        "values", 1, (1, 2), 1.0,
    )  # fmt: skip
    assert (found.max_ulp is None) == (dtype not in FLOATS and not dtype.is_complex)
    assert "1 of 12 elements differ by at most 1" in found.text
    assert "the first is [1, 2]" in found.text


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 1e-40, 1024.0])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_ulp_are_the_steps_from_one_number_to_the_other(dtype, start, steps):
    a = b = dtype(start)
    for _ in range(steps):
        b = np.nextafter(b, dtype(-np.inf))
    found = one(torch.tensor([a]), torch.tensor([b]))
    assert found.max_ulp == steps == ulp_between(a, b)
    assert found.max_abs == float(np.float64(a) - np.float64(b))


@given(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2)
def test_ulp_and_distance_of_any_two_numbers(x, y):
    def order(value):
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return bits if bits < 1 << 31 else (1 << 31) - bits

    found = list(differences({"x": torch.tensor([x])}, {"x": torch.tensor([y])}))
    if struct.pack("<f", x) == struct.pack("<f", y):
        assert not found
    else:
        assert found[0].max_ulp == abs(order(x) - order(y))
        assert found[0].max_abs == abs(x - y)


def test_ulp_between_the_ends_of_float64():
    ends = torch.finfo(torch.float64)
    found = one(torch.tensor([ends.min], dtype=torch.float64), torch.tensor([ends.max]).double())
    assert found.num_not_finite == 1  # 3.4e38 was float32
    found = one(
        torch.tensor([ends.min], dtype=torch.float64),
        torch.tensor([ends.max], dtype=torch.float64),
    )
    assert found.max_ulp == 2 * 0x7FEFFFFFFFFFFFFF


def test_bits_decide():
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, 0.0, inf, 1.0])
    assert not list(differences({"x": a}, {"x": a.clone()}))
    found = one(a, torch.tensor([nan, -0.0, 2.0, 1.0]))
    assert (found.num_different, found.num_not_finite, found.first) == (2, 1, (1,))
    assert (found.max_abs, found.max_ulp) == (0, 0)


def test_large_tensors_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(compare, "_PIECE", 10)
    a, b = torch.zeros(7, 9), torch.zeros(7, 9)
    b[3, 4] = b[6, 8] = 0.5
    b[4, 0] = -2
    found = one(a, b)
    assert (found.num_different, found.first, found.max_abs) == (3, (3, 4), 2.0)


def test_shapes_types_and_what_is_missing_are_told_in_order():
    a = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "same": torch.ones(1)}
    b = {"same": torch.ones(1), "d": torch.zeros(3), "b": torch.zeros(2, 1), "a": torch.ones(2)}
    b["e"] = torch.zeros(2).double()
    a["e"] = torch.zeros(2)
    found = list(differences(a, b))
    assert [(item.path, item.what) for item in found] == [
        ("a", "values"), ("b", "shape"), ("c", "missing"), ("e", "dtype"), ("d", "missing"),
    ]  # fmt: skip
    assert found[1].text == "b: float32 (2,), and float32 (2, 1)"
    assert found[2].text == "c: float32 (2,) in A, not in B"
    assert found[4].text == "d: float32 (3,) in B, not in A"


def test_plain_values_differ_in_value_and_type():
    a = {"lr": 0.1, "nan": math.nan, "zero": 0.0, "one": 1, "name": "x", "gone": None}
    b = {"lr": 0.1, "nan": math.nan, "zero": -0.0, "one": 1.0, "name": "x" * 100}
    found = list(plain_differences(a, b))
    assert [item.path for item in found] == ["zero", "one", "name", "gone"]
    assert all(len(item.text) < 100 for item in found)


def test_plain_values_have_paths_and_tensors_are_left_out():
    state = {
        "a": {"b": [1, {"x/y": 2.5}], 3: None},
        "t": torch.zeros(1),
        "empty": [],
        "u": (True,),
    }
    assert plain_values(state) == {
        "a/b/0": 1, "a/b/1/x%2Fy": 2.5, "a/3": None, "empty": [], "u/0": True,
    }  # fmt: skip
