"""A batch has the results of its separate operations, however they are fused."""

import pytest
import torch

from hpctrain.core.errors import CommError, RankLostError
from hpctrain.negotiation.execution import Executor
from hpctrain.negotiation.reducing import neutral_request
from hpctrain.negotiation.request import (
    Adasum,
    Average,
    Handle,
    Kind,
    Max,
    Min,
    Product,
    ReduceOp,
    Request,
    Sum,
)

SIZES = pytest.mark.ranks(1, 2, 3, 4)
SHAPES = ((3,), (), (2, 5), (0,), (2, 0, 3), (4, 4))
LARGE = (300_000,)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16)


def values_of(rank, shape, dtype):
    source = torch.Generator().manual_seed(17 * rank + len(shape))
    return torch.randint(1, 5, shape, generator=source).to(dtype)


def expected(size, shape, dtype, op):
    """Return the exact result; small integers make every order of summation give the same bits."""
    every = torch.stack([values_of(rank, shape, dtype).double() for rank in range(size)])
    if op in (Sum, Average):
        total = every.sum(0) / (size if op is Average else 1)
        return total.trunc() if not dtype.is_floating_point else total
    return {Min: every.amin(0), Max: every.amax(0), Product: every.prod(0)}[op]


def carried_out(executor, requests, timeline=None):
    handles = [Handle(None, request, f"name {n}") for n, request in enumerate(requests)]
    executor.carry_out(handles, timeline)
    assert all(handle.done() for handle in handles)
    return handles


@SIZES
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("fusion_bytes", [0, 100, 1 << 26])
def test_fused_reductions_equal_separate_ones(ranks, in_place, fusion_bytes):
    cases = [
        (shape, dtype, op)
        for op in (Sum, Average, Min, Max, Product)
        for dtype in DTYPES
        for shape in SHAPES
    ]
    cases.insert(7, (LARGE, torch.float32, Sum))
    executor = Executor(ranks, fusion_bytes=fusion_bytes)
    given = [values_of(ranks.rank, shape, dtype) for shape, dtype, _ in cases]
    before = [tensor.clone() for tensor in given]
    requests = [
        Request(Kind.ALLREDUCE, None, (tensor,), in_place=in_place, op=op)
        for tensor, (_, _, op) in zip(given, cases, strict=True)
    ]
    handles = carried_out(executor, requests)
    for handle, tensor, was, case in zip(handles, given, before, cases, strict=True):
        (result,) = handle.wait()
        assert (result is tensor) == in_place
        assert in_place or torch.equal(tensor, was)
        assert torch.allclose(result.double(), expected(ranks.size, *case), rtol=1e-2, atol=0.0)


@SIZES
def test_a_group_may_mix_dtypes_and_sizes(ranks):
    shapes = [(3,), LARGE, (2, 2), (5,)]
    dtypes = [torch.float32, torch.float32, torch.int64, torch.float64]
    group = [values_of(ranks.rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
    other = Request(Kind.ALLREDUCE, None, (values_of(ranks.rank, (7,), torch.float32),), op=Sum)
    grouped = Request(Kind.ALLREDUCE, None, group, op=Sum)
    first, second = carried_out(Executor(ranks), [grouped, other])
    for result, shape, dtype in zip(first.wait(), shapes, dtypes, strict=True):
        assert torch.equal(result.double(), expected(ranks.size, shape, dtype, Sum))
    assert torch.equal(second.wait()[0].double(), expected(ranks.size, (7,), torch.float32, Sum))


@SIZES
def test_strided_tensors_and_parameters_are_reduced_in_place(ranks):
    executor = Executor(ranks)
    column = torch.zeros(4, 3)[:, 1]
    parameter = torch.nn.Parameter(torch.full((2, 2), float(ranks.rank)))
    turned = torch.arange(6.0).view(2, 3).t()
    requests = [
        Request(Kind.ALLREDUCE, None, (tensor,), in_place=True, op=Sum)
        for tensor in (column, parameter, turned)
    ]
    for is_inference in (True, False):  # first fused with others, then alone
        column.fill_(1.0)
        with torch.inference_mode(mode=is_inference):
            carried_out(executor, requests)
        assert column.tolist() == [ranks.size] * 4
        carried_out(Executor(ranks), requests[:1])
        assert column.tolist() == [ranks.size**2] * 4
    assert parameter.requires_grad
    assert torch.equal(turned, torch.arange(6.0).view(2, 3).t() * ranks.size**2)


@SIZES
def test_a_failed_operation_does_not_affect_the_others(ranks):
    good = Request(Kind.ALLREDUCE, None, (torch.ones(2),), op=Sum)
    bad = Request(Kind.ALLREDUCE, None, (torch.ones(2, dtype=torch.complex64),), op=Min)
    rows = Request(Kind.ALLGATHER, None, (torch.ones(1),))
    first, second, third = carried_out(Executor(ranks), [good, bad, rows])
    assert first.wait()[0].tolist() == [ranks.size] * 2
    assert third.wait()[0].tolist() == [1.0] * ranks.size
    with pytest.raises(CommError, match="order"):
        second.wait()


def test_after_the_loss_of_a_rank_every_operation_fails():
    class Broken:
        rank, size = 0, 2

        def barrier(self):
            raise RankLostError("rank 1 is gone")

        def allreduce_(self, *_, **__):
            pytest.fail("nobody may wait for a rank that is gone")

    requests = [
        Request(Kind.BARRIER, None, ()),
        Request(Kind.ALLREDUCE, None, (torch.ones(2),), op=Sum),
    ]
    for handle in carried_out(Executor(Broken()), requests):
        with pytest.raises(RankLostError, match="gone"):
            handle.wait()


@SIZES
@pytest.mark.parametrize("op", [op for op in ReduceOp if op is not Adasum], ids=str)
def test_a_placeholder_operation_of_a_joined_rank_does_not_change_the_result(ranks, op):
    """The last rank has joined, so its stand-in must not affect the values of the others."""
    dtypes = (torch.float32, torch.float16, torch.int8, torch.uint64, torch.bool, torch.complex64)
    for dtype in dtypes:
        if (op is Average and dtype is torch.bool) or (dtype.is_complex and op in (Min, Max)):
            continue
        mine = Request(Kind.ALLREDUCE, None, (torch.ones(2, 3).to(dtype),), op=op)
        last = ranks.size - 1
        if ranks.rank == last:
            mine = neutral_request(mine.signature, ranks.size)
        assert mine.signature.shapes == ((2, 3),)
        (handle,) = carried_out(Executor(ranks), [mine])
        if ranks.size > 1 and dtype is not torch.bool:
            value = {Sum: last, Average: last / ranks.size}.get(op, 1)
            value = value if dtype.is_floating_point or dtype.is_complex else int(value)
            pair = [handle.wait()[0], torch.full((2, 3), value).to(dtype)]
            assert pair[0].dtype is dtype
            assert torch.allclose(*(each.to(torch.complex128) for each in pair), rtol=1e-3)
        elif ranks.size > 1:
            assert bool(handle.wait()[0].all())


class Listener:
    def __init__(self):
        self.heard = []

    def __getattr__(self, what):
        return lambda name="", *args: self.heard.append((what, name, *args[:1]))


@SIZES
def test_a_timeline_records_every_phase_of_every_operation(ranks):
    listener = Listener()
    pair = [Request(Kind.ALLREDUCE, None, (torch.ones(2),), op=Sum) for _ in range(2)]
    carried_out(Executor(ranks), [*pair, Request(Kind.BARRIER, None, ())], listener)
    copies = ["MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    together = [("begin", "ALLREDUCE"), *(("begin", copy) for copy in copies)]
    heard = [(what, *args) for what, name, *args in listener.heard if name == "name 1"]
    assert [event for event in heard if event[0] == "begin"] == together
    assert [what for what, *_ in heard] == ["begin", *["begin", "end"] * 3, "end"]
    written = [(what, name) for what, name, *_ in listener.heard if what == "flush" or "2" in name]
    alone = [("begin", "name 2"), ("flush", ""), *[(w, "name 2") for w in ("begin", "end", "end")]]
    assert written == [("flush", ""), ("flush", ""), *alone, ("flush", "")]
