"""Check laws of all communicators, on every path; ``test_fuzz`` compares results with numpy."""

import hashlib

import pytest
import torch

from hpctrain.comm.agreement import agreed
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.ops import Op
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, ConfigError, MismatchError
from tests.comm.conftest import PATHS, connected
from tests.comm.fuzz import fuzz


def values_of(rank, numel, dtype=torch.float32):
    source = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randn(numel, generator=source, dtype=torch.float64).to(dtype)


def bits_of(tensor):
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


class Labelled(torch.Tensor):
    """A tensor of another class."""


def negative_of(values):
    """Return ``values`` as a lazy negative: the imaginary part of a lazy conjugate."""
    return torch.complex(values, -values).conj().imag


LAYOUTS = {
    "plain": torch.clone,
    "transposed": lambda values: values.t().contiguous().t(),
    "with gaps": lambda values: torch.stack([values, values], -1)[..., 0],
    "parameter": lambda values: torch.nn.Parameter(values.clone(), values.is_floating_point()),
    "subclass": lambda values: values.clone().as_subclass(Labelled),
    "conjugate": lambda values: values.conj().resolve_conj().clone().conj(),
    "negative": lambda values: (
        negative_of(values) if values.is_floating_point() else values.clone()
    ),
}


# Results


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_repeated_sum_is_correct_for_any_layout(world, comm, dtype, scale):
    if scale is not None and not (dtype.is_floating_point or dtype.is_complex):
        scale = None
    options = {"op": Op.BOR if dtype is torch.bool else Op.SUM, "scale": scale}
    for shape in ((2, 3), (400, 700)):
        numel = torch.Size(shape).numel()
        one = (values_of(0, numel, torch.complex64) * (3 + 4j)).view(shape)
        one = one.real.gt(0) if dtype is torch.bool else torch.view_as_real(one)[..., 0].to(dtype)
        one = torch.complex(one.real, one.real + 1) if dtype.is_complex else one
        total = one.clone()
        for _ in range(1, world.size):
            total = total | one if dtype is torch.bool else total + one
        total = total if scale is None else total * scale
        for _ in range(2):  # the first sum is not repeated
            for name, layout in LAYOUTS.items():
                tensor = layout(one)
                version = tensor._version
                comm.allreduce_(tensor, **options).wait()
                assert torch.equal(tensor.detach().as_subclass(torch.Tensor), total), (name, shape)
                assert world.size == 1 or tensor._version > version, name


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [100_003, 1_500_003])  # the second one uses several slots
def test_the_same_plan_gives_the_same_bits_again_on_all_ranks(world, comm, numel):
    given = values_of(world.rank, numel)
    seen = set()
    for _ in range(2):
        bucket, tensor = comm.new_bucket(numel, given.dtype), given.clone()
        bucket.flat.copy_(given)
        for result, what in ((bucket.flat, bucket), (tensor, tensor)):
            comm.allreduce_(what).wait()
            seen.add((what is bucket, bits_of(result)))
    assert len(seen) == 2
    assert len(set(world.allgather(frozenset(seen)))) == 1
    exact = sum(values_of(rank, numel).double() for rank in range(world.size))
    assert (tensor.double() - exact).abs().max().item() < 1e-5


@pytest.mark.ranks(2, 3, 4)
def test_memory_between_the_elements_of_a_tensor_is_unchanged(world, comm):
    whole = torch.zeros(6, 8)
    columns = whole[:, ::2]  # neither contiguous nor dense
    columns.copy_(torch.arange(24.0).view(6, 4) * (world.rank + 1))
    comm.allreduce_(columns).wait()
    assert torch.equal(columns, torch.arange(24.0).view(6, 4) * sum(range(1, world.size + 1)))
    assert not whole[:, 1::2].any()
    parameter = torch.nn.Parameter(torch.ones(2))
    comm.allreduce_(parameter).wait()
    assert parameter.tolist() == [world.size] * 2


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64])
def test_part_of_a_bucket_is_reduced_and_the_rest_is_unchanged(comm, dtype):
    bucket = comm.new_bucket(1 << 16, torch.uint8)
    bucket.flat.fill_(comm.rank + 1)
    for numel in (1000, 1, 4097, 0):
        part = bucket.part(numel, dtype)
        values = (torch.arange(numel) % 7 + comm.rank).to(dtype)
        part.flat.copy_(values)
        comm.allreduce_(part, op=Op.SUM).wait()
        comm.allreduce_(values, op=Op.SUM).wait()
        assert torch.equal(part.flat, values)
    assert bool((bucket.flat[4097 * dtype.itemsize :] == comm.rank + 1).all())


@pytest.mark.ranks(1, 2, 3, 4)
def test_large_tensors_are_gathered_by_messages_into_separate_memory(world, comm):
    def of(rank):
        return torch.full((101,) * rank, float(rank), dtype=torch.bfloat16)

    gathered = comm.all_gather(of(world.rank))
    assert [torch.equal(t, of(rank)) for rank, t in enumerate(gathered)] == [True] * world.size
    gathered[0].fill_(7.0)
    assert not any((t == 7.0).any() for t in gathered[1:])


@pytest.mark.ranks(2)
def test_more_than_two_to_the_31_elements(world):
    with connected(Settings()) as connection:
        numel = (1 << 31) + 5
        tensor = torch.full((numel,), 100 + world.rank, dtype=torch.uint8)
        connection.comm.allreduce_(tensor).wait()
        ends = torch.cat((tensor[:100], tensor[-100:]))
        assert bool((ends == 201).all())
        assert int(tensor[:: 1 << 12].long().sum()) == 201 * len(range(0, numel, 1 << 12))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("path", ["one node", "nodes of two"])
def test_sums_through_node_memory_are_correct_with_late_ranks(world, jitter, path):
    jitter()
    with connected(PATHS[path]) as connection:
        comm, total = connection.comm, sum(range(1, world.size + 1))
        buckets = [comm.new_bucket(numel, torch.float64) for numel in (1, 1000, 40_003)]
        for number in range(1, 9):
            for bucket in buckets:
                bucket.flat.fill_(number * (world.rank + 1))
                comm.allreduce_(bucket).wait()
                assert bool((bucket.flat == number * total).all())
            tensor = torch.full((100_003,), float(number * (world.rank + 1)))
            comm.allreduce_(tensor).wait()
            assert bool((tensor == number * total).all())


# Messages


@pytest.mark.ranks(2, 3, 4)
def test_a_message_waits_for_its_receiver_while_others_reduce(world, comm):
    # On the same communicator: the reductions, which use messages of tag 0, must not receive this.
    if world.rank == 0:
        comm.send(torch.tensor([42], dtype=torch.int16), 1)
        comm.send(torch.zeros(100), 1)
    total = torch.full((1,), world.rank, dtype=torch.int16)
    comm.allreduce_(total, op=Op.MAX).wait()
    assert total.item() == world.size - 1
    if world.rank == 1:
        incoming = torch.zeros(1, dtype=torch.int16)
        comm.recv_(incoming, 0)
        assert incoming.item() == 42
        with pytest.raises(CommError, match=r"rank 1 expects .* and rank 0 sends more"):
            comm.recv_(torch.zeros(10), 0)
    comm.barrier()


@pytest.mark.ranks(2, 3)
def test_traffic_counts_sent_bytes(world):
    comm = MpiCommunicator(world.Dup())
    before = comm.traffic()
    comm.allreduce_(torch.zeros(1000))
    assert comm.traffic().since(before).rail_bytes == 4000
    comm.alltoall([torch.zeros(10)] * world.size)
    assert comm.traffic().since(before).rail_bytes == 4000 + 40 * (world.size - 1)
    comm.close()


# Groups


@pytest.mark.ranks(1, 2, 3, 4)
def test_groups_number_their_ranks_in_the_given_order_and_overlap(world, comm):
    size = world.size
    named = [range(size)[::-2], range(size)[::-1], [size - 1]]
    named += [(a, b) for a in range(size) for b in range(a + 1, size)]
    groups = [(ranks, comm.group(ranks)) for ranks in map(list, named)]
    for ranks, group in groups:
        assert (group is None) == (world.rank not in ranks)
        if group is not None:
            assert (group.rank, group.size) == (ranks.index(world.rank), len(ranks))
            assert group.allreduce(torch.full((300,), world.rank))[-1] == sum(ranks)
            assert group.allgather_object(world.rank) == ranks
    backwards = groups[1][1]
    inner = backwards.group(list(range(size))[:2])  # ranks of the group
    assert (inner is None) == (world.rank < size - 2)
    if inner is not None:
        assert inner.allgather_object(world.rank) == [size - 1, size - 2][: inner.size]
    for group in (inner, *(group for _, group in groups)):
        if group is not None and group is not comm:
            group.close()
    comm.barrier()


# Errors


@pytest.mark.ranks(2, 3)
def test_a_closed_communicator_can_not_be_used(world, comm):
    group = comm.group(range(world.size))
    group.close()
    there = (world.rank + 1) % world.size
    for call in (
        lambda: group.allreduce(torch.ones(2)),
        lambda: group.send(torch.ones(2), there),
        lambda: group.recv_(torch.ones(2), there),
        group.barrier,
    ):
        with pytest.raises(CommError, match="must be open when it is used"):
            call()


REFUSED = {
    "floating-point": lambda c: c.allreduce_(torch.ones(3, dtype=torch.int32), scale=0.5),
    "min must be of ordered values, got complex64": lambda c: c.allreduce_(
        torch.ones(3, dtype=torch.complex64), op=Op.MIN
    ),
    r"must be dense, got torch\.sparse_coo": lambda c: c.allreduce_(torch.eye(3).to_sparse()),
    "must be on the CPU, got one on meta": lambda c: c.broadcast_(torch.zeros(3, device="meta")),
    "root must be a rank from 0 to LAST": lambda c: c.broadcast_(torch.zeros(1), root=c.size),
    "must have SIZE tensors of one dtype, got": lambda c: c.alltoall(
        [torch.zeros(1)] * (c.size + 1)
    ),
    r"got SIZE of \['float32', 'int64'\]|must have 1 tensors": lambda c: c.alltoall(
        [torch.zeros(1)] * (c.size - 1) + [torch.zeros(c.size, dtype=torch.int64)] * (c.size > 1)
    ),
    "one per rank, with the sum 10, got": lambda c: c.reduce_scatter(
        torch.ones(10), numels=[1] * c.size
    ),
    r"from 0 to LAST, each once, got \[\]": lambda c: c.group([]),
    r"from 0 to LAST, each once, got \[0, 0\]": lambda c: c.group([0, 0]),
    r"from 0 to LAST, each once, got \[99\]": lambda c: c.group([99]),
    r"from 0 to LAST, each once, got \[-1\]": lambda c: c.group([-1]),
    "tag must be from 0|two ranks or more to send": lambda c: c.send(torch.ones(1), 0, tag=-1),
    "dest must be a rank from 0 to LAST|two ranks or more": lambda c: c.send(
        torch.ones(1), c.size
    ),
}


@pytest.mark.ranks(1, 2, 3, 4)
def test_invalid_arguments_are_rejected_before_communication(comm):
    for message, call in REFUSED.items():
        match = message.replace("SIZE", str(comm.size)).replace("LAST", str(comm.size - 1))
        with pytest.raises(CommError, match=match):
            call(comm)
    comm.barrier()


DIFFERENT = {
    r"gather of.* on rank 0.*|broadcast of an object": lambda c, last: (
        c.gather_object if last else c.broadcast_object
    )(1),
    "float64.*float32": lambda c, last: c.all_gather(zeros_of(last)),
    "float64.*from.*float32": lambda c, last: c.broadcast_(zeros_of(last)),
    "float64.*float32.* in parts": lambda c, last: c.reduce_scatter(zeros_of(last)),
    "alltoall of float64.*alltoall of float32": lambda c, last: c.alltoall(
        [zeros_of(last)] * c.size
    ),
    "in parts of": lambda c, last: c.reduce_scatter(
        torch.zeros(c.size), numels=[1] * c.size if last else [c.size] + [0] * (c.size - 1)
    ),
    "barrier": lambda c, last: c.group(range(c.size)) if last else c.barrier(),
}


def zeros_of(last):
    return torch.zeros(2, dtype=torch.float32 if last else torch.float64)


@pytest.mark.ranks(2, 3, 4)
def test_different_calls_raise_on_all_ranks(world, comm):
    for message, call in DIFFERENT.items():
        with pytest.raises(MismatchError, match=rf"same calls in the same order.*({message})"):
            call(comm, world.rank == world.size - 1)
        with pytest.raises(MismatchError, match=r"an earlier call has ended the communicator"):
            comm.barrier()
        comm.rejoin()
    comm.barrier()


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_raise_or_none_does(world, comm):
    comm.agree(True)
    with agreed(comm):
        pass
    last = world.size - 1
    named = f"rank {last}: " if last else "^"
    with pytest.raises(MismatchError, match=f"{named}disk of {last} is full"):
        comm.agree(world.rank != last, f"disk of {world.rank} is full")

    def check(fails):
        with agreed(comm):
            if fails:
                raise ConfigError("the file is missing")

    with pytest.raises(MismatchError, match=f"{named}the file is missing"):
        check(world.rank == last)
    with pytest.raises(MismatchError, match=r"^the file is missing$"):  # all ranks raised it
        check(fails=True)
    with pytest.raises(ZeroDivisionError), agreed(comm):
        raise ZeroDivisionError
    comm.barrier()


NUM_CASES = 250
"""By each path of ours; ``python -m tests.comm.fuzz -n N --seed S`` on any ranks for more."""
NUM_CASES_OF_HOROVOD = 100  # each case takes one or several cycles of Horovod, of a millisecond


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.limit(120)
def test_random_collectives_equal_numpy(world, connection):
    by_horovod = connection.plan.engine == "horovod"
    num_cases = NUM_CASES_OF_HOROVOD if by_horovod else NUM_CASES
    fuzz(connection.comm, num_cases, seed=world.size)
