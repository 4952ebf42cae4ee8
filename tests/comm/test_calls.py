"""A call is one number, and can be read back."""

import torch

from hpctrain.comm.call_check import bucket_call, describe_call, tensor_call
from hpctrain.comm.ops import Op


def test_every_call_has_a_number_of_its_own_and_is_read_back():
    calls = {
        tensor_call(op, dtype, numel): f"{op.value} of {numel} {str(dtype).removeprefix('torch.')}"
        for op in Op
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.int16)
        for numel in (0, 1, 1 << 33)
    } | {
        bucket_call(n, op): f"{op.value} of bucket number {n}"
        for op in Op
        for n in (1, 2, 1 << 20)
    }
    assert len(calls) == len(Op) * (4 * 3 + 3)
    assert all(describe_call(call) == text for call, text in calls.items())
    assert all(-(1 << 63) <= call < 1 << 62 for call in calls)


def test_another_factor_is_another_call():
    scales = (None, 1.0, 0.5, 1 / 3, 100.0)
    calls = {tensor_call(Op.SUM, torch.float32, 10, scale) for scale in scales}
    calls |= {bucket_call(1, Op.SUM, scale) for scale in scales}
    assert len(calls) == 2 * len(scales)
    assert sum("by a factor" in describe_call(c) for c in calls) == 2 * len(scales) - 2
