"""What is not a sum: objects, broadcasts, messages, agreement."""

import pytest
import torch

from hpctrain.errors import CommError, MismatchError


@pytest.mark.ranks(1, 2, 3, 4)
def test_broadcast_gives_every_rank_the_root_values(world, comm):
    root = world.size - 1
    for tensor in (
        torch.full((5, 3), float(world.rank)),
        torch.full((4, 4), world.rank, dtype=torch.bfloat16)[:, 1],
        torch.tensor(world.rank),
        torch.zeros(0),
        torch.tensor([world.rank == root]),
    ):
        comm.broadcast_(tensor, root).wait()
        assert bool((tensor == (1 if tensor.dtype is torch.bool else root)).all())


@pytest.mark.ranks(1, 2, 3, 4)
def test_objects_go_to_all_and_come_from_all(world, comm):
    assert comm.broadcast_object({"from": world.rank}, root=world.size - 1) == {
        "from": world.size - 1
    }
    assert comm.allgather_object(world.rank) == list(range(world.size))
    gathered = comm.gather_object("x" * world.rank)
    assert gathered == (["x" * r for r in range(world.size)] if world.rank == 0 else None)


@pytest.mark.ranks(2, 3, 4)
def test_tensors_go_round_from_rank_to_rank(world, comm):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    incoming = torch.zeros(3, 2, dtype=torch.float16)
    outgoing = torch.full((3, 2), float(world.rank), dtype=torch.float16)
    if world.rank % 2 == 0:
        comm.send(outgoing, right, tag=7)
        comm.recv_(incoming, left, tag=7)
    else:
        comm.recv_(incoming, left, tag=7)
        comm.send(outgoing, right, tag=7)
    assert bool((incoming == left).all())


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_raise_or_none_does(world, comm):
    comm.agree(True)
    last = world.size - 1
    with pytest.raises(MismatchError, match=f"rank {last}: disk of {last} is full"):
        comm.agree(world.rank != last, f"disk of {world.rank} is full")
    comm.barrier()


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_does_not_exist_is_refused(world, comm):
    with pytest.raises(CommError, match=f"root must be a rank from 0 to {world.size - 1}"):
        comm.broadcast_(torch.zeros(1), root=world.size)
