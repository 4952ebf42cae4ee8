"""A call is one number, and can be read back."""

import torch

from hpctrain.comm.calls import bucket_call, describe_call, tensor_call
from hpctrain.comm.ops import Op


def test_every_call_has_a_number_of_its_own_and_is_read_back():
    calls = {
        tensor_call(op, dtype, numel): f"{op.value} of {numel} {str(dtype).removeprefix('torch.')}"
        for op in Op
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.int16)
        for numel in (0, 1, 1 << 40)
    } | {bucket_call(n): f"bucket number {n}" for n in (1, 2, 1 << 20)}
    assert len(calls) == len(Op) * 4 * 3 + 3
    assert all(describe_call(call) == text for call, text in calls.items())
