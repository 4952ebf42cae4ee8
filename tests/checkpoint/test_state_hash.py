"""Check that the hash is equal for equal bits, names, types and shapes only."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.checkpoint.format import state_hash as module
from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.checkpoint.format.tensor_file import DTYPES
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.states import of_every_kind


def test_hash_is_fixed():
    state = {
        "weight": torch.arange(6.0).view(2, 3),
        "step": 3,
        "lr": 0.1,
        "more": [None, "a", b""],
    }
    assert state_hash(state) == "184db062c9011c3b"
    assert state_hash({}) == "d77c6ca335be370d"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_changes_the_hash(dtype):
    tensor = torch.arange(40, dtype=torch.uint8).repeat(16).view(dtype).clone()
    memory = tensor.view(torch.uint8)
    seen = {state_hash({"x": tensor})}
    for bit in range(8):
        memory[-1] ^= 1 << bit
        seen.add(state_hash({"x": tensor}))
    assert len(seen) == 9


def test_names_types_shapes_and_containers_change_the_hash():
    zeros = torch.zeros(4)
    values = [
        *(zeros, zeros.view(2, 2), zeros.to(torch.int32), -zeros, torch.zeros(0)),
        *(torch.zeros(0, 4), {"a": zeros}, [zeros], {0: zeros}, {"0": zeros}),
        *(None, 0, 0.0, -0.0, False, "0", b"0", "", math.nan, math.inf, 1, True),
    ]
    states = [{"b": zeros}, {"a/a": zeros}, *({"a": zeros, "b": more} for more in ({}, []))]
    states += [{"a": value} for value in values]
    assert len({state_hash(state) for state in states}) == len(states)


def test_order_memory_and_views_do_not_change_the_hash():
    x = torch.randn(3, 4, 5, 6)
    y = torch.randn(7, dtype=torch.complex64)
    expected = state_hash({"x": x, "y": y, "z": (1, 2)})
    same = [
        {"z": [1, 2], "y": y.clone(), "x": x.clone()},
        {"x": x.to(memory_format=torch.channels_last), "y": y.conj().clone().conj(), "z": [1, 2]},
        {"x": torch.cat([x, x])[3:], "y": torch.stack([y, y], 1)[:, 0], "z": [1, 2]},
        {"x": nn.Parameter(x), "y": y, "z": [1, 2]},
    ]
    assert [state_hash(state) for state in same] == [expected] * 4


def test_large_tensors_that_are_not_contiguous_are_hashed_in_pieces(monkeypatch):
    x = torch.randn(5, 6, 7)
    expected = state_hash({"x": x.permute(2, 0, 1).contiguous()})
    monkeypatch.setattr(module, "_PIECE_BYTES", 64)
    assert state_hash({"x": x.permute(2, 0, 1)}) == expected


def test_a_tensor_can_be_resized_afterwards():
    x = torch.zeros(4)
    state_hash({"x": x})
    x.resize_(1000)


@pytest.mark.parametrize(
    ("value", "output"),
    [
        (np.float32(1), "got float32 at /'a'/1"),
        ({1.5: 0}, r"keys of a state .* got 1.5 at /'a'/1"),
        (torch.eye(2).to_sparse(), "dense, got torch.sparse_coo at /'a'/1"),
        (object(), "got object"),
    ],
)
def test_values_without_defined_bits_raise(value, output):
    with pytest.raises(CheckpointError, match=output):
        state_hash({"a": [0, value]})


@pytest.mark.ranks(1, 2, 3, 4)
def test_hash_computed_by_several_ranks_is_equal_to_the_hash_of_one(world):
    comm = MpiCommunicator(world)
    state, alone = of_every_kind(), state_hash(of_every_kind())
    assert state_hash(state, comm) == state_hash(state, SerialCommunicator()) == alone
    assert state_hash({}, comm) == state_hash({})


@pytest.mark.ranks(2, 3, 4)
def test_states_with_different_names_raise_on_every_rank(world):
    state = {"a": 1, "last" if world.rank else "first": torch.ones(3)}
    with pytest.raises(CheckpointError, match="have the same state"):
        state_hash(state, MpiCommunicator(world))
