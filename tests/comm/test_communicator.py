"""What is not a sum: objects, broadcasts, messages, tensors of all shapes, agreement."""

import pytest
import torch

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.ops import Op
from hpctrain.core.errors import CommError, MismatchError


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
    named = f"rank {last}: " if last else "^"
    with pytest.raises(MismatchError, match=f"{named}disk of {last} is full"):
        comm.agree(world.rank != last, f"disk of {world.rank} is full")
    comm.barrier()


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_does_not_exist_is_refused(world, comm):
    with pytest.raises(CommError, match=f"root must be a rank from 0 to {world.size - 1}"):
        comm.broadcast_(torch.zeros(1), root=world.size)


@pytest.mark.ranks(1, 2, 3, 4)
def test_tensors_of_different_shapes_are_gathered(world, comm):
    def of(rank, numel=2):
        return torch.full((numel,) * rank, float(rank), dtype=torch.bfloat16)

    gathered = comm.all_gather(of(world.rank))
    assert [torch.equal(t, of(rank)) for rank, t in enumerate(gathered)] == [True] * world.size
    large = comm.all_gather(of(world.rank, 101))  # a million elements on rank 3: by messages
    assert [torch.equal(t, of(rank, 101)) for rank, t in enumerate(large)] == [True] * world.size
    gathered[0].fill_(7.0)  # each has memory of its own
    assert not any((t == 7.0).any() for t in gathered[1:])


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_sends_to_every_rank(world, comm):
    def message(source, dest):
        return torch.full((source, dest), 10 * source + dest, dtype=torch.uint16)

    received = comm.alltoall([message(world.rank, dest) for dest in range(world.size)])
    for source, tensor in enumerate(received):
        assert tensor.shape == (source, world.rank)
        assert torch.equal(tensor, message(source, world.rank))


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_disagree_about_a_dtype_all_learn_it(world, comm):
    dtype = torch.float32 if world.rank else torch.float64
    mine = torch.zeros(2, dtype=dtype)
    for call in (comm.all_gather, comm.broadcast_, comm.reduce_scatter):
        with pytest.raises(MismatchError, match=r"float64.*float32"):
            call(mine)
    with pytest.raises(MismatchError, match=r"alltoall of float64.*alltoall of float32"):
        comm.alltoall([mine] * world.size)
    comm.barrier()


@pytest.mark.ranks(2, 3)
def test_ranks_at_different_calls_all_learn_it(world, comm):
    call = comm.gather_object if world.rank else comm.broadcast_object
    with pytest.raises(
        MismatchError, match="got rank 0: broadcast of an object from rank 0; rank"
    ):
        call(1)


@pytest.mark.ranks(1, 2, 3)
def test_alltoall_takes_one_tensor_for_each_rank(world, comm):
    with pytest.raises(CommError, match=f"takes {world.size} tensors of one dtype, got"):
        comm.alltoall([torch.zeros(1)] * (world.size + 1))
    with pytest.raises(CommError, match=r"got 2 of \['float32', 'int64'\]|takes [13] tensors"):
        comm.alltoall([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])


@pytest.mark.ranks(2, 3)
def test_a_message_that_is_too_long_is_refused(world, comm):
    if world.rank == 0:
        comm.send(torch.zeros(100), 1)
    elif world.rank == 1:
        with pytest.raises(CommError, match=r"rank 1 takes .* and rank 0 sends more"):
            comm.recv_(torch.zeros(10), 0)
    comm.barrier()


@pytest.mark.ranks(2, 3, 4)
def test_a_message_waits_for_its_receiver_while_others_reduce(world, comm):
    # On the same communicator: the reductions, by messages of tag 0, must not take it.
    if world.rank == 0:
        comm.send(torch.tensor([42], dtype=torch.int16), 1)
    total = torch.full((1,), world.rank, dtype=torch.int16)
    comm.allreduce_(total, op=Op.MAX).wait()
    assert total.item() == world.size - 1
    if world.rank == 1:
        incoming = torch.zeros(1, dtype=torch.int16)
        comm.recv_(incoming, 0)
        assert incoming.item() == 42
    with pytest.raises(CommError, match="tag must be from 0"):
        comm.send(total, 0, tag=-1)


@pytest.mark.ranks(1, 2, 3)
def test_only_dense_tensors_are_taken(comm):
    with pytest.raises(CommError, match=r"must be dense, got torch\.sparse_coo"):
        comm.allreduce_(torch.eye(3).to_sparse())
    with pytest.raises(CommError, match="must be on the CPU, got one on meta"):
        comm.broadcast_(torch.zeros(3, device="meta"))


@pytest.mark.ranks(1, 2, 3, 4)
def test_groups_without_sense_are_refused(world, comm):
    for ranks in ([], [0, 0], [world.size], [-1]):
        with pytest.raises(CommError, match=f"from 0 to {world.size - 1}, each once, got"):
            comm.group(ranks)


@pytest.mark.ranks(2, 3)
def test_flat_groups_number_their_ranks_in_the_given_order(world):
    comm = MpiCommunicator(world.Dup())
    backwards = comm.group(range(world.size - 1, -1, -1))
    assert backwards.rank == world.size - 1 - world.rank
    assert backwards.allgather_object(world.rank) == list(range(world.size - 1, -1, -1))
    backwards.close()
    alone = comm.group([1])
    assert (alone is None) == (world.rank != 1)
    if alone is not None:
        assert alone.size == 1
        alone.close()
    comm.close()


@pytest.mark.ranks(2, 3)
def test_traffic_counts_what_was_sent(world):
    comm = MpiCommunicator(world.Dup())
    before = comm.traffic()
    comm.allreduce_(torch.zeros(1000))
    assert comm.traffic().since(before).rail_bytes == 4000
    comm.alltoall([torch.zeros(10)] * world.size)
    assert comm.traffic().since(before).rail_bytes == 4000 + 40 * (world.size - 1)
    comm.close()
