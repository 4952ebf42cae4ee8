"""Check that states are compared bitwise, and that the first difference is measured."""

import math

import pytest
import torch

from hpctrain.checkpoint.format.tensor_file import DTYPES
from hpctrain.checkpoint.state_diff import differences, leaves


def one(a, b):
    (found,) = differences({"x": a}, {"x": b})
    return found


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_one_changed_element_is_found_and_measured(dtype):
    for shape in ((), (0,), (7,), (3, 4)):
        a = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        assert list(differences({"x": a}, {"x": a.clone()})) == []
    a = torch.zeros(3, 4).to(dtype)
    b = torch.zeros(3, 4)
    b[1, 2] = 1
    found = one(a, b.to(dtype))
    assert (found.what, found.num_different, found.max_abs) == ("values", 1, 1.0)
    assert "1 of 12 elements differ by at most 1" in found.text
    assert "the first is [1, 2]" in found.text


def test_comparison_is_bitwise():
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, 0.0, inf, 1.0])
    assert not list(differences({"x": a}, {"x": a.clone()}))
    found = one(a, torch.tensor([nan, -0.0, 2.0, 1.0]))
    assert (found.num_different, found.max_abs) == (2, 0)


def test_shapes_dtypes_and_missing_tensors_are_reported_in_order():
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
    a = {"lr": 0.1, "nan": math.nan, "zero": 0.0, "one": 1, "name": "x", "gone": None, "none": []}
    b = {"lr": 0.1, "nan": math.nan, "zero": -0.0, "one": 1.0, "name": "x" * 100, "none": ()}
    found = list(differences(a | {"was": 1}, b | {"was": torch.zeros(1)}))
    assert [item.path for item in found] == ["zero", "one", "name", "gone", "none", "was"]
    assert all(len(item.text) < 100 for item in found)


def test_all_values_have_paths_and_tensors_come_first():
    tensor = torch.zeros(1)
    state = {"a": {"b": [1, {"x/y": 2.5}], 3: None}, "t": tensor, "empty": [], "u": (True,)}
    found = leaves(state, "in")
    assert list(found.items()) == [
        ("in/t", tensor), ("in/a/b/0", 1), ("in/a/b/1/x%2Fy", 2.5), ("in/a/3", None),
        ("in/empty", []), ("in/u/0", True),
    ]  # fmt: skip
