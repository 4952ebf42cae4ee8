"""Fusion of all-reduces depends on the signatures only, and keeps every request."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.negotiation.execution import DIRECT_BYTES, fusible_bytes, runs
from hpctrain.negotiation.request import Adasum, Average, Kind, Max, Request, Sum

DTYPES = (torch.float32, torch.int64)


@st.composite
def requests(draw):
    kind = draw(st.sampled_from((Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.ALLGATHER)))
    sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=len(sizes), max_size=len(sizes)))
    tensors = [torch.empty(n, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    if kind is Kind.ALLGATHER:
        return Request(kind, None, tensors)
    op, factor = draw(st.sampled_from((Sum, Average, Adasum))), draw(st.sampled_from((1.0, 0.5)))
    return Request(kind, None, tensors, op=op, postscale=factor)


def key_of(request):
    s = request.signature
    return s.dtypes[0], s.op, s.prescale, s.postscale


@given(st.lists(requests(), max_size=20), st.integers(0, 5000))
def test_every_request_is_in_one_run_and_runs_have_one_signature(given_requests, fusion_bytes):
    found = runs(given_requests, fusion_bytes)
    assert sorted(number for run in found for number in run) == list(range(len(given_requests)))
    assert [run[0] for run in found] == sorted(run[0] for run in found)
    for run in found:
        assert run == sorted(run)
        together = [given_requests[number] for number in run]
        assert len({key_of(request) for request in together}) == 1 or len(run) == 1
        if len(run) > 1:
            assert sum(fusible_bytes(request) for request in together) <= fusion_bytes


def test_requests_that_cannot_be_fused_are_alone():
    large, small = torch.empty(DIRECT_BYTES, dtype=torch.uint8), torch.empty(3)
    alone = [
        Request(Kind.ALLREDUCE, None, (large,), op=Sum),
        Request(Kind.ALLREDUCE, None, (small, small.long()), op=Sum),
        Request(Kind.ALLREDUCE, None, (small,), op=Adasum),
        Request(Kind.BROADCAST, None, (small,), root=0),
        Request(Kind.BARRIER, None, ()),
    ]
    assert runs(alone, 1 << 30) == [[0], [1], [2], [3], [4]]


def test_other_requests_in_between_do_not_prevent_fusion():
    small = torch.empty(3)
    kinds = [(Sum, 1.0), (Max, 1.0), (Sum, 1.0), (Sum, 2.0), (Max, 1.0)]
    mixed = [
        Request(Kind.ALLREDUCE, None, (small,), op=op, prescale=factor) for op, factor in kinds
    ]
    assert runs(mixed, 1 << 20) == [[0, 2], [1, 4], [3]]
    assert runs(mixed, 0) == [[0], [1], [2], [3], [4]]
