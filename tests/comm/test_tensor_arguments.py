"""Check the conversion of tensors of any layout to flat tensors and to bytes."""

import gc

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.tensor_arguments import flat_of, flattened, host_bytes

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128),
]


@st.composite
def layouts(draw):
    """Draw a shape, an offset, and strides, of which some are 0 or larger than needed."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 7), min_size=len(shape), max_size=len(shape)))
    return tuple(shape), tuple(strides), draw(st.integers(0, 3))


@given(layout=layouts(), dtype=st.sampled_from(DTYPES), is_one=st.booleans())
def test_bytes_are_the_elements_in_order(layout, dtype, is_one):
    shape, strides, start = layout
    if is_one:  # contiguous for torch, with any stride
        shape = (1,) * len(shape)
    room = (
        start + 1 + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
    )
    memory = np.random.default_rng(room).integers(0, 2, (room, dtype.itemsize), np.uint8)
    memory *= 1 if dtype is torch.bool else 113
    tensor = torch.from_numpy(memory.copy()).view(-1).view(dtype).as_strided(shape, strides, start)
    items = memory.reshape(-1).view(f"V{dtype.itemsize}")[start:]
    wanted = np.lib.stride_tricks.as_strided(
        items, shape, [stride * dtype.itemsize for stride in strides]
    ).tobytes()
    assert host_bytes(tensor) == wanted
    flat = flat_of(tensor)
    assert (flat.stride(), flat.shape) == ((1,), (tensor.numel(),))
    assert flat.view(torch.uint8).tolist() == list(wanted)
    if tensor.is_contiguous() and tensor.numel():
        assert flat.data_ptr() == tensor.data_ptr()


@given(layout=layouts(), dtype=st.sampled_from([torch.complex64, torch.complex128]))
def test_lazy_conjugates_and_negatives_are_resolved(layout, dtype):
    shape, strides, start = layout
    numbers = torch.arange(100).to(dtype) * (1 + 2j)
    tensor = numbers.as_strided(shape, strides, start).conj()
    for lazy in (tensor, tensor.imag):
        assert host_bytes(lazy) == np.array(lazy.tolist(), str(lazy.dtype)[6:]).tobytes()
        before = torch.tensor(lazy.tolist(), dtype=lazy.dtype)
        if all(stride or n < 2 for n, stride in zip(shape, strides, strict=True)):
            with flattened(lazy) as flat:
                flat[:1] = 7
            before.view(-1)[:1] = 7
            assert lazy.flatten()[:1].tolist() == before.view(-1)[:1].tolist()


def test_bytes_of_a_contiguous_tensor_are_its_memory():
    tensor = torch.zeros(1, 5)[:, 0]
    host_bytes(tensor)[:] = torch.ones(1).numpy().tobytes()
    assert tensor.tolist() == [1.0]


def test_bytes_exist_as_long_as_they_are_referenced():
    held = host_bytes(torch.full((1000,), 7, dtype=torch.uint8))[10:]
    gc.collect()
    others = [torch.zeros(1000, dtype=torch.uint8) for _ in range(50)]
    assert held == b"\7" * 990
    assert all(not other.any() for other in others)


def test_a_storage_may_be_resized_after_its_bytes_were_read():
    tensor = torch.ones(10)
    assert len(host_bytes(tensor)) == 40
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_tensors_that_require_gradients_and_parameters_have_bytes():
    weight = torch.nn.Parameter(torch.ones(3, 2).t())
    assert host_bytes(weight) == host_bytes(torch.ones(6))


@pytest.mark.parametrize("tensor", [torch.arange(12.0).view(3, 4).t(), torch.zeros(1, 2)[:, 0]])
def test_single_rank_scatters_tensors_of_any_layout(tensor):
    given_out = SerialCommunicator().reduce_scatter(tensor)
    assert given_out.tolist() == tensor.flatten().tolist()
