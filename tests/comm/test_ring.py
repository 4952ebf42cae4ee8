"""The ring: the sum, the same bits on all ranks, with the bytes that its paper promises."""

import pytest
import torch

from hpctrain.comm.ring import ring_allreduce_


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("numel", [1, 2, 5, 1003])
def test_ring_is_the_sum_with_the_same_bits_everywhere(world, dtype, numel):
    def values(rank):
        return (torch.arange(numel) % 7 + rank).to(dtype)

    tensor = values(world.rank)
    ring_allreduce_(world, tensor, check=lambda: None)
    expected = sum(values(rank).long() for rank in range(world.size)).to(dtype)
    assert torch.equal(tensor, expected)  # small whole numbers: exact in every dtype


@pytest.mark.ranks(3, 4)
def test_order_of_addition_is_fixed(world):
    results = []
    for _ in range(3):
        source = torch.Generator().manual_seed(world.rank)
        tensor = torch.randn(10_007, generator=source)
        ring_allreduce_(world, tensor, check=lambda: None)
        results.append(tensor.numpy().tobytes())
    assert len(set(results)) == 1
    assert len(set(world.allgather(results[0]))) == 1


@pytest.mark.ranks(2, 3, 4)
def test_each_rank_sends_two_parts_in_n_of_each(world):
    sent = []

    class Counting:
        size, rank = world.size, world.rank
        Irecv = world.Irecv

        @staticmethod
        def Isend(buffer, dest):  # noqa: N802 - MPI's name
            sent.append(buffer[1])
            return world.Isend(buffer, dest)

    numel = 12_000  # divisible by 2, 3 and 4
    ring_allreduce_(Counting, torch.ones(numel), check=lambda: None)
    assert sum(sent) == 2 * (world.size - 1) * numel * 4 // world.size
