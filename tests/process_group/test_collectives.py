"""Every collective of torch.distributed gives the documented result, on every data path."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.process_group.conftest import all_gather_single, reduce_scatter_single

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usefixtures("nodes")]

SMALL = ((), (0,), (7,), (3, 5))
MORE = (600_000,)  # larger than a slot of node memory
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
)


def values(rank, shape=(7,), dtype=torch.float32):
    numbers = torch.arange(torch.Size(shape).numel()).add(rank).remainder(5).view(shape)
    return numbers.remainder(2).bool() if dtype is torch.bool else numbers.to(dtype)


def ranks():
    return range(dist.get_world_size())


def same(found, expected):
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    if found.dtype.itemsize == 1 or found.dtype is torch.uint16:
        found, expected = (one.contiguous().view(torch.uint8) for one in (found, expected))
    assert torch.equal(found, expected)


CASES = [(shape, torch.float32) for shape in (*SMALL, MORE)] + [((6,), dtype) for dtype in DTYPES]


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_collectives_without_reduction_deliver_unchanged_values(layout):
    me, size = dist.get_rank(), dist.get_world_size()

    def laid_out(tensor):
        if layout == "contiguous" or not tensor.dim():
            return tensor.clone()
        return torch.stack([tensor, tensor], -1)[..., 0]

    for shape, dtype in CASES:
        mine = laid_out(values(me, shape, dtype))
        everybody = [values(rank, shape, dtype) for rank in ranks()]
        outs = [laid_out(torch.zeros_like(mine)) for _ in ranks()]
        dist.all_gather(outs, mine)
        for out, expected in zip(outs, everybody, strict=True):
            same(out, expected)
        root = size - 1
        out = laid_out(values(me, shape, dtype))
        dist.broadcast(out, root)
        same(out, everybody[root])
        outs = [laid_out(torch.zeros_like(mine)) for _ in ranks()] if me == root else None
        dist.gather(mine, outs, root)
        for out, expected in zip(outs or [], everybody, strict=bool(outs)):
            same(out, expected)
        parts = [laid_out(values(3 * r + 1, shape, dtype)) for r in ranks()]
        out = laid_out(torch.zeros_like(mine))
        dist.scatter(out, parts if me == 0 else None, 0)
        same(out, values(3 * me + 1, shape, dtype))
        parts = [laid_out(values(me + 2 * r, shape, dtype)) for r in ranks()]
        outs = [laid_out(torch.zeros_like(mine)) for _ in ranks()]
        dist.all_to_all(outs, parts)
        for rank, out in enumerate(outs):
            same(out, values(rank + 2 * me, shape, dtype))


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_collectives_do_not_invalidate_tensors_saved_by_autograd(layout):
    me, size = dist.get_rank(), dist.get_world_size()
    step = 1 if layout == "contiguous" else 2
    many, one = ([torch.ones(6 * step)[::step] for _ in range(count)] for count in (size, 7))
    whole = torch.ones(6 * size)
    written = [*many, *one, whole]
    dist.all_reduce(one[0])
    dist.all_reduce(one[1], ReduceOp.AVG)
    dist.reduce(one[2], 0)
    dist.broadcast(one[3], 0)
    dist.reduce_scatter(one[4], [torch.ones(6) for _ in ranks()])
    dist.scatter(one[5], [torch.ones(6) for _ in ranks()] if me == 0 else None)
    sending = dist.isend(torch.ones(6), (me + 1) % size)
    dist.recv(one[6], (me - 1) % size)
    sending.wait()
    dist.all_gather(many, torch.ones(6))
    dist.gather(torch.ones(6), many if me == 0 else None)
    dist.all_to_all(many, [torch.ones(6) for _ in ranks()])
    all_gather_single(whole, torch.ones(6))
    dist.all_to_all_single(whole, torch.ones(6 * size))
    with _coalescing_manager():
        dist.all_reduce(one[0])
        dist.all_reduce(one[1])
    assert [tensor._version for tensor in written] == [0] * len(written)
    leaf = torch.ones(size, 6, requires_grad=True)
    views = (leaf * 1).chunk(size)
    dist.broadcast(views[0]._base, 0)
    sum(views).sum().backward()
    assert leaf.grad.eq(1).all()


def test_functional_operations_registered_in_python():
    me, size, ops = dist.get_rank(), dist.get_world_size(), torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    schema = ops.all_gather_into_tensor_out.default._schema
    takes_groups = str(schema.arguments[2].type) != "str"  # also accepted since torch 2.13
    for group in (name, dist.group.WORLD) if takes_groups else (name,):
        out = torch.zeros(2 * size)
        ops.wait_tensor(
            ops.all_gather_into_tensor_out(torch.full((2,), float(me)), size, group, out=out)
        )
        assert out.tolist() == [rank for rank in ranks() for _ in range(2)]
    if not hasattr(ops, "batch_p2p_ops"):  # added in torch 2.13
        return
    peers = [(me + 1) % size, (me - 1) % size]
    received = torch.zeros(3)
    for work in ops.batch_p2p_ops(
        ["isend", "irecv"], peers, [4, 4], [torch.full((3,), float(me)), received], name
    ):
        ops.wait_tensor(work)
    assert received.eq(peers[1]).all()


def test_single_tensor_collectives_concatenate_parts_of_all_ranks():
    me, size = dist.get_rank(), dist.get_world_size()
    for shape, dtype in CASES:
        if not shape:
            continue
        out = torch.zeros(size * shape[0], *shape[1:], dtype=dtype)
        all_gather_single(out, values(me, shape, dtype))
        same(out, torch.cat([values(rank, shape, dtype) for rank in ranks()]))
        given = torch.cat([values(me + rank, shape, dtype) for rank in ranks()])
        out = torch.zeros_like(given)
        dist.all_to_all_single(out, given)
        same(out, torch.cat([values(me + rank, shape, dtype) for rank in ranks()]))
    in_place = torch.zeros(size, 5)
    in_place[me] = values(me, (5,))
    all_gather_single(in_place, in_place[me])
    same(in_place, torch.stack([values(rank, (5,)) for rank in ranks()]))


@pytest.mark.parametrize("numel", [1, 400_000])
def test_all_to_all_accepts_unequal_parts(numel):
    me = dist.get_rank()
    sizes = [(me + rank) % 3 * numel for rank in ranks()]
    given = torch.cat([values(me, (size, 2)) for size in sizes])
    out = torch.zeros_like(given)
    dist.all_to_all_single(out, given, sizes, sizes)
    same(out, torch.cat([values(rank, (sizes[rank], 2)) for rank in ranks()]))


REDUCTIONS = {
    ReduceOp.SUM: torch.sum,
    ReduceOp.AVG: torch.mean,
    ReduceOp.PRODUCT: torch.prod,
    ReduceOp.MIN: torch.amin,
    ReduceOp.MAX: torch.amax,
}


def reduced(kind, tensors):
    if kind in REDUCTIONS:
        return REDUCTIONS[kind](torch.stack(tensors), 0)
    function = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    total = tensors[0]
    for other in tensors[1:]:
        total = function[kind.name](total, other)
    return total


def test_floating_point_reductions():
    for kind in REDUCTIONS:
        for shape in (*SMALL, MORE)[: 5 if kind == ReduceOp.SUM else 4]:
            check_reduction(kind, shape)


def check_reduction(kind, shape):
    me, size = dist.get_rank(), dist.get_world_size()
    everybody = [values(rank, shape, torch.float64) for rank in ranks()]
    expected = reduced(kind, everybody)
    out = everybody[me].clone()
    dist.all_reduce(out, kind)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=0)
    out = everybody[me].clone()
    dist.reduce(out, 1, kind)
    torch.testing.assert_close(out, expected if me == 1 else everybody[me], rtol=1e-12, atol=0)
    if shape:
        out = torch.zeros(shape, dtype=torch.float64)
        parts = [[values(r + part, shape, torch.float64) for r in ranks()] for part in ranks()]
        dist.reduce_scatter(out, [parts[part][me] for part in ranks()], kind)
        torch.testing.assert_close(out, reduced(kind, parts[me]), rtol=1e-12, atol=0)
        given = torch.cat([parts[part][me] for part in ranks()])
        out = given.view(size, *shape)[me]  # in place
        reduce_scatter_single(out, given, kind)
        torch.testing.assert_close(out, reduced(kind, parts[me]), rtol=1e-12, atol=0)


def test_integer_reductions_are_exact_and_wrap_around():
    me, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        for kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.MAX, ReduceOp.MIN):
            everybody = [values(rank, (9,), dtype) + 3 for rank in ranks()]
            out = everybody[me].clone()
            dist.all_reduce(out, kind)
            assert torch.equal(out, reduced(kind, everybody))
        out = torch.full((70,), 120, dtype=dtype)
        dist.all_reduce(out)
        assert torch.equal(out, torch.full((70,), size * 120).to(dtype))
    out = torch.tensor([7 * (me + 1), -7])
    dist.all_reduce(out, ReduceOp.AVG)
    total = 7 * sum(range(1, size + 1))
    assert out.tolist() == [total // size, -7]


def test_premul_sum_scales_the_values_of_each_rank():
    me, size = dist.get_rank(), dist.get_world_size()
    for factor in (me + 1.0, torch.tensor([me + 1.0], dtype=torch.float64)):
        out = torch.full((5,), 3.0, dtype=torch.float64)
        dist.all_reduce(out, _make_nccl_premul_sum(factor))
        assert out.tolist() == [3.0 * sum(range(1, size + 1))] * 5


def test_sparse_tensors_are_summed():
    me, size = dist.get_rank(), dist.get_world_size()
    where, what = [[0, me + 1], [2, 0]], [1.0, me + 5.0]
    mine = torch.sparse_coo_tensor(where, what, (6, 3), check_invariants=True)
    dist.all_reduce(mine)
    expected = torch.zeros(6, 3)
    expected[0, 2] = size
    for rank in ranks():
        expected[rank + 1, 0] = rank + 5.0
    assert torch.equal(mine.to_dense(), expected)


def test_coalesced_operations():
    me, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((n,), me + 1.0) for n in (1, 5, 3)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        assert set(tensor.tolist()) == {sum(range(1, size + 1))}
    outs = [torch.zeros(size * n) for n in (2, 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for out in outs:
            all_gather_single(out, torch.full((len(out) // size,), float(me)))
    manager.wait()
    assert outs[1].tolist() == [float(rank) for rank in ranks() for _ in range(3)]
    outs = [torch.zeros(n) for n in (2, 3)]
    with _coalescing_manager(device=torch.device("cpu")):
        for out in outs:
            reduce_scatter_single(out, torch.ones(size * len(out)))
    assert outs[0].tolist() == [size] * 2


def test_object_collectives():
    me, size = dist.get_rank(), dist.get_world_size()
    found = [None] * size
    dist.all_gather_object(found, {"rank": me, "long": "x" * me})
    assert found == [{"rank": rank, "long": "x" * rank} for rank in ranks()]
    given = [me, "two"] if me == 1 else [None, None]
    dist.broadcast_object_list(given, 1)
    assert given == [1, "two"]
    found = [None] * size if me == 0 else None
    dist.gather_object(me, found, 0)
    assert found == (list(ranks()) if me == 0 else None)
    out = [None]
    dist.scatter_object_list(out, [f"for {rank}" for rank in ranks()] if me == 0 else None, 0)
    assert out == [f"for {me}"]


def test_messages_are_matched_by_rank_and_tag():
    me, size = dist.get_rank(), dist.get_world_size()
    after, before = (me + 1) % size, (me - 1) % size
    for numel in (0, 3, 300_000):
        first, second = torch.zeros(numel), torch.zeros(numel)
        works = [
            dist.isend(torch.full((numel,), 10.0 + me), after, tag=5),
            dist.isend(torch.full((numel,), 20.0 + me), after, tag=4),
            dist.irecv(second, before, tag=4),
            dist.irecv(first, before, tag=5),
        ]
        for work in works:
            work.wait()
        assert set(first.tolist()) == {10.0 + before} - ({10.0 + before} if not numel else set())
        assert set(second.tolist()) == {20.0 + before} - ({20.0 + before} if not numel else set())
    if me == 0:
        found = set()
        for _ in range(size - 1):
            out = torch.zeros(2, 2).t()
            source = dist.recv(out, tag=9)
            assert set(out.flatten().tolist()) == {float(source)}
            found.add(source)
        assert found == set(range(1, size))
    else:
        dist.send(torch.full((2, 2), float(me)), 0, tag=9)
    out = torch.zeros(3)
    ops = [dist.P2POp(dist.isend, torch.full((3,), float(me)), after)]
    ops.append(dist.P2POp(dist.irecv, out, before))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert out.tolist() == [before] * 3


def test_operations_wait_for_functional_collectives_in_flight():
    size, rank = dist.get_world_size(), dist.get_rank()
    under_way = functional.all_reduce(torch.tensor([1.0, rank]), "sum", dist.group.WORLD)
    sent = dist.isend(under_way, (rank + 1) % size)
    dist.recv(found := torch.zeros(2), (rank - 1) % size)
    sent.wait()
    assert found.tolist() == [size, size * (size - 1) / 2]
    dist.all_gather(parts := [torch.zeros(2) for _ in range(size)], under_way)
    assert all(torch.equal(part, found) for part in parts)


def test_inference_mode_may_be_switched_on_and_off():
    size = dist.get_world_size()
    for numel in (5, 40_000):
        with torch.inference_mode():
            made = torch.ones(numel)
            dist.all_reduce(made, async_op=True).wait()
            dist.all_reduce(made)
        out = torch.ones(numel)
        dist.all_reduce(out)
        dist.all_reduce(out, async_op=True).wait()
        assert out.eq(size**2).all()
        assert made.eq(size**2).all()
