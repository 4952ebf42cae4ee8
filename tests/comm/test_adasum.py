"""Compare Adasum with a tree of pairs in one process."""

from collections.abc import Generator

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.adasum import adasum_
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CommError
from tests.comm.simulated import run_ranks

SHAPES = [(7,), (), (3, 5), (0,), (1,), (130,)]


@pytest.fixture
def comm(world: MPI.Intracomm) -> Generator[Communicator]:
    """Provide a communicator of one kind, because all kinds send the same messages."""
    made = MpiCommunicator(world.Dup()) if world.size > 1 else SerialCommunicator()
    yield made
    made.close()


def reference(vectors: list[Tensor]) -> Tensor:
    """Combine odd ranks first, then pairs of pairs, weighted by their number of ranks."""
    sides = [(vector.double(), 1) for vector in vectors]
    extra = len(sides) - (1 << (len(sides).bit_length() - 1))
    sides = [combined(*sides[2 * i : 2 * i + 2]) for i in range(extra)] + sides[2 * extra :]
    while len(sides) > 1:
        sides = [combined(*sides[i : i + 2]) for i in range(0, len(sides), 2)]
    return sides[0][0]


def combined(one: tuple[Tensor, int], other: tuple[Tensor, int]) -> tuple[Tensor, int]:
    (a, n), (b, m) = one, other
    dot = (a * b).sum()
    a_share = n / (n + m) * dot / (a * a).sum() if a.any() else 0
    b_share = m / (n + m) * dot / (b * b).sum() if b.any() else 0
    return (1 - a_share) * a + (1 - b_share) * b, n + m


def inputs(rank: int, dtype: torch.dtype, shapes=SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-6),
        (torch.float16, 1e-3),
        (torch.bfloat16, 8e-3),
    ],
)
def test_each_tensor_is_combined_by_a_tree_of_pairs(world, comm, dtype, tolerance):
    tensors = inputs(world.rank, dtype)
    adasum_(comm, tensors)
    given = [inputs(rank, dtype) for rank in range(world.size)]
    for tensor, *vectors in zip(tensors, *given, strict=True):
        expected = reference(vectors)
        assert tensor.dtype is dtype
        torch.testing.assert_close(tensor.double(), expected, rtol=tolerance, atol=tolerance)
    bits = [tensor.double().flatten().tolist() for tensor in tensors]
    assert comm.allgather_object(bits) == [bits] * world.size


@pytest.mark.parametrize("size", [2, 4, 5, 6, 7, 8, 13])
def test_any_number_of_ranks_combines_by_a_tree_of_pairs(size):
    def work(wire):
        wire.recv_ = wire.receive_
        tensors = inputs(wire.rank, torch.float64)
        adasum_(wire, tensors)
        return tensors

    results, wires = run_ranks(size, work, eager=False)
    given = [inputs(rank, torch.float64) for rank in range(size)]
    for vectors, tensors in zip(zip(*given, strict=True), zip(*results, strict=True), strict=True):
        assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
        torch.testing.assert_close(tensors[0], reference(list(vectors)), rtol=1e-12, atol=1e-12)
    if size == 8:
        assert {wire.num_messages for wire in wires} == {2 * 3 + 1 + 2 + 3}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("numel", [1, 2, 5, 200_003])
def test_parallel_gradients_are_averaged_and_orthogonal_ones_added(world, comm, numel):
    values = torch.linspace(-1.0, 2.0, numel)
    parallel = values * (world.rank + 1.0)
    orthogonal = torch.zeros(numel * world.size)
    orthogonal[world.rank :: world.size] = values
    adasum_(comm, [parallel, orthogonal])
    torch.testing.assert_close(parallel, values * (world.size + 1) / 2)
    torch.testing.assert_close(orthogonal, values.repeat_interleave(world.size))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**60])
def test_common_factor_scales_the_result(world, comm, factor):
    [plain], [scaled] = (inputs(world.rank, torch.float32, [(50,)]) for _ in range(2))
    scaled *= factor
    adasum_(comm, [plain])
    adasum_(comm, [scaled])
    torch.testing.assert_close(scaled, plain * factor, rtol=1e-5, atol=0.0)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parallel_gradients_of_very_different_length_are_averaged(world, comm, dtype):
    limits = torch.finfo(dtype)
    share = world.rank / (world.size - 1)
    length = limits.max ** (0.5 * share) * limits.tiny ** (1 - share)
    given = (torch.randn(512, generator=torch.Generator().manual_seed(1)) * length).to(dtype)
    mean = torch.stack(comm.all_gather(given.double())).mean(0)
    adasum_(comm, [given])
    assert (given.double() - mean).norm() < 20 * limits.eps * mean.norm()


@pytest.mark.ranks(2, 3, 4)
def test_zeros_change_nothing_and_tensors_may_have_any_layout(world, comm):
    tensor = torch.zeros(6, 4).T
    if world.rank == 0:
        tensor += torch.arange(24.0).view(4, 6)
    adasum_(comm, [tensor])
    assert torch.equal(tensor, torch.arange(24.0).view(4, 6))


@pytest.mark.ranks(1, 2)
def test_integers_are_rejected_and_empty_inputs_are_permitted(comm):
    adasum_(comm, [])
    adasum_(comm, [torch.zeros(0)])
    with pytest.raises(CommError, match="tensors of Adasum must be floating point, got int64"):
        adasum_(comm, [torch.zeros(3, dtype=torch.int64)])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-20, 1e19, 1e30, 6e37])
def test_values_of_any_size_are_combined_as_in_float64(world, comm, size):
    vectors = [inputs(rank, torch.float64)[5].clamp(-1, 1) * size for rank in range(world.size)]
    vectors = [vector.float() for vector in vectors]
    [found] = [vectors[world.rank].clone()]
    adasum_(comm, [found])
    assert torch.allclose(found.double(), reference(vectors), rtol=1e-4, atol=4 * 2.0**-149)
