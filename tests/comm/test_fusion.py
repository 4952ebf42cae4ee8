"""Bucket planning: every tensor in one bucket, whole, aligned and apart from the others."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.bucket import TensorSpec, plan_buckets

DTYPES = st.sampled_from((torch.float32, torch.float64, torch.bfloat16))
SPECS = st.lists(
    st.builds(TensorSpec, name=st.just("t"), numel=st.integers(0, 5000), dtype=DTYPES), max_size=40
)
LIMITS = st.one_of(st.none(), st.integers(1, 20_000))


@given(SPECS, LIMITS, st.integers(0, 2))
def test_every_tensor_is_in_one_bucket_in_order_aligned_and_within_the_limit(specs, limit, marks):
    plans = plan_buckets(specs, limit, marks_per_tensor=marks)
    assert sorted(i for plan in plans for i in plan.members) == list(range(len(specs)))
    assert [plan.members[0] for plan in plans] == sorted(plan.members[0] for plan in plans)
    if limit is None:
        assert len(plans) == len({spec.dtype for spec in specs})
    for plan in plans:
        assert list(plan.members) == sorted(plan.members)
        end = 0
        for member, offset in zip(plan.members, plan.offsets, strict=True):
            assert specs[member].dtype == plan.dtype
            assert offset * plan.dtype.itemsize % 64 == 0
            assert offset >= end
            end = offset + specs[member].numel
        assert end + marks * len(plan.members) <= plan.numel
        assert limit is None or len(plan.members) == 1 or end * plan.dtype.itemsize <= limit


@given(SPECS, LIMITS, st.data())
def test_a_group_shares_one_bucket_per_dtype_and_complete_buckets_come_first(specs, limit, data):
    number = st.one_of(st.none(), st.integers(0, 3))
    groups = data.draw(st.lists(number, min_size=len(specs), max_size=len(specs)))
    plans = plan_buckets(specs, limit, groups=groups)
    assert sorted(i for plan in plans for i in plan.members) == list(range(len(specs)))
    found = [(plan.dtype, {groups[i] for i in plan.members}) for plan in plans]
    assert all(len(numbers) == 1 for _, numbers in found)
    grouped = [(dtype, min(numbers)) for dtype, numbers in found if numbers != {None}]
    assert len(set(grouped)) == len(grouped)
    last = [plan.members[-1] for plan in plans]
    assert last == sorted(last)
