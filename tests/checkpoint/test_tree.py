"""Check that states are flattened and restored without loss, and other values rejected."""

import json
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format.manifest import PRIVATE
from hpctrain.checkpoint.format.state_tree import MAX_DEPTH, flatten, lines, unflatten
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.states import PLAIN, of_every_kind, same


def again(state):
    leaves, skeleton = flatten(state)
    return unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), leaves.__getitem__)


def test_unflattened_state_is_equal_to_the_original():
    assert same(of_every_kind(), again(of_every_kind()))
    assert same(PLAIN, again(PLAIN))
    assert again(float("nan")) != again(float("nan"))


def test_paths_are_readable_and_unique():
    tensor = torch.zeros(1)
    paths, _ = flatten({"model": {"0.weight": tensor}, "optimizer": {"state": {0: [tensor]}}})
    assert list(paths) == ["model/0.weight", "optimizer/state/0/0"]
    keys = ["a/b", "a", "a%2Fb", "0", 0, "-1", -1, "", "%", "%private", "__metadata__"]
    paths, _ = flatten({key: {"b": tensor} for key in keys} | {"a": {"b": tensor}})
    assert len(paths) == len(keys)
    assert not any(path.startswith(PRIVATE) for path in paths)


Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    "value",
    [np.float64(0.5), np.zeros(3), Path("x"), len, torch.nn.ReLU(), {1}, torch.float32, Point(1)],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_value_is_rejected_with_its_path(value):
    with pytest.raises(CheckpointError, match=r"got .* at model/list/1; convert it"):
        flatten({"model": {"list": [0, value]}})


@pytest.mark.parametrize("key", [None, 1.5, (1,), True, 2**63])
def test_keys_must_be_strings_or_integers(key):
    with pytest.raises(CheckpointError, match="keys of a state must be str or int of 64 bit, got"):
        flatten({"a": {key: 1}})


def test_recursive_state_is_rejected():
    state = []
    state.append(state)
    with pytest.raises(CheckpointError, match="check whether a container contains itself"):
        flatten(state)


def test_lines_name_every_value():
    state = {"a": [1, (2.5, "x")], "b": {"c": None, "t": torch.zeros(1), "big": 2**70}}
    assert lines(state) == [
        "a/0 = 1", "a/1/0 = 2.5", "a/1/1 = 'x'", "b/c = None",
        "b/big = {'int': '0x400000000000000000'}", "the state is a mapping of 2 items",
        "a is a list of 2 items", "a/1 is a tuple of 2 items", "b is a mapping of 3 items",
    ]  # fmt: skip


def deep(levels):
    node = []
    for _ in range(levels):
        node = [node]
    return node


@pytest.mark.parametrize(
    "skeleton",
    [
        {}, {"dict": 1}, {"dict": [1]}, {"dict": [[1]]}, {"dict": [[1.5, 2]]}, {"tuple": "ab"},
        {"int": "12q"}, {"float": "x"}, {"bytes": "?"}, {"bytes": "\u00e4"}, {"tensor": 1},
        {"int": 1}, {"eval": "1"}, {"int": "1", "float": "1"}, deep(MAX_DEPTH + 1),
        {"dict": [[[], 1]]},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_skeleton_raises(skeleton):
    with pytest.raises(CheckpointError, match="the skeleton of a state"):
        unflatten(skeleton, lambda path: path)
