"""Python objects are packed: by name, or as they are."""

import numpy as np
import pytest
import torch

from hpctrain.core.errors import DataError

CODE = """
import numpy as np
N = 100

def rows():
    for i in range(N):
        yield {"x": np.full(3, i, "f4"), "y": i, "name": "n" * i}

class Pairs:
    def __len__(self): return N
    def __getitem__(self, i): return np.full((2, 2), i), i % 5

LIST = [{"x": i} for i in range(N)]

def fails():
    yield {"x": 1}
    raise RuntimeError("my own")
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rows"


def test_a_function_that_yields_dicts(code, packed):
    done, found = packed(f"{code}:rows")
    assert np.array_equal(found["x"], [np.full(3, i) for i in range(100)])
    assert np.array_equal(found["y"], np.arange(100))
    assert bytes(found["name"][99]) == b"n" * 99
    assert done.manifest.fields["x"].dtype == "<f4"


def test_an_object_with_a_length_is_read_in_any_order(code, packed):
    _, found = packed(f"{code}:Pairs", fields={"x": "0", "y": "1"}, shuffle=0)
    order = [int(x[0, 0]) for x in found["x"]]
    assert sorted(order) == list(range(100))
    assert order != sorted(order)
    assert np.array_equal(found["y"], np.array(order) % 5)
    _, found = packed(f"{code}:LIST")
    assert np.array_equal(found["x"], np.arange(100))


def test_objects_of_the_program_itself(packed):
    tensors = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    _, found = packed(tensors, fields={"x": "0"})
    assert np.array_equal(found["x"], np.arange(8.0).reshape(4, 2))
    _, found = packed(lambda: ({"x": [i]} for i in range(3)))
    assert np.array_equal(found["x"], [[0], [1], [2]])
    with pytest.raises(DataError, match="give the function that makes it"):
        packed(iter([{"x": 1}]))


def test_fields_that_are_ragged_later_are_named(packed):
    rows = [{"x": np.zeros(3)}] * 70 + [{"x": np.zeros(5)}]
    with pytest.raises(DataError, match=r"item 70 of list has \(5,\).*--ragged x"):
        packed(rows)
    _, found = packed(rows, ragged=("x",))
    assert [len(x) for x in found["x"]] == [3] * 70 + [5]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "at least one sample"),
        ([3], "a sample is a dict"),
        ([{"x": 1}, {"y": 1}], "item 1 of list lacks x and has y besides"),
        ([{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}], r"have the shape \(length, \*\(3,\)"),
        ([{"x": 1}, {"x": [1]}], "no length"),
        ([{"x": object()}], "convert it first"),
        ([{"x": [[1, 2], [3]]}], "x of item 0 of list is not: .*convert it first"),
        ({"x": [1, 2, 3]}, "dict gives one dict; yield a dict for each sample"),
        (lambda: {"x": [1, 2, 3]}, "gives one dict"),
        (lambda: None, "gives one NoneType"),
    ],
)
def test_what_cannot_be_packed_is_told(packed, rows, words):
    with pytest.raises(DataError, match=words):
        packed(rows)


def test_an_error_of_the_users_own_code_stays_what_it_is(code, packed):
    with pytest.raises(RuntimeError, match="my own"):
        packed(f"{code}:fails")
    with pytest.raises(DataError, match="there is no module nowhere"):
        packed("nowhere:rows")
    with pytest.raises(DataError, match="has no nothing"):
        packed(f"{code}:nothing")
    with pytest.raises(DataError, match="as module:function, got 'my rows'"):
        packed("my rows", kind="python")
