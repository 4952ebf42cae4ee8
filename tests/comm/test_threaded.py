"""Check a communicator on a thread: same results, in the order of the calls, no call lost."""

import threading

import pytest
import torch

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.ops import Op
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.core.errors import CommError, MismatchError
from tests.comm.fuzz import fuzz


@pytest.fixture
def threaded(world):
    made = ThreadedCommunicator(MpiCommunicator(world.Dup()))
    yield made
    made.close()


class Gate(SerialCommunicator):
    """Block every reduction until it is opened, and record the calls."""

    def __init__(self):
        self.opened = threading.Event()
        self.done = []

    def allreduce_(self, tensor, *, op=Op.SUM, scale=None):
        self.opened.wait()
        self.done.append(tensor.numel())
        return super().allreduce_(tensor, op=op, scale=scale)

    def close(self):
        self.done.append("close")


@pytest.mark.ranks(2, 3, 4)
def test_operations_in_flight_complete_with_their_sums(world, threaded):
    tensors = [torch.full((1000 * k,), float(world.rank)) for k in range(8)]
    works = [threaded.allreduce_(tensor, scale=2.0) for tensor in tensors]
    product = torch.tensor([2.0])
    works.append(threaded.allreduce_(product, op=Op.PRODUCT))
    root = torch.tensor([world.rank])
    works.append(threaded.broadcast_(root, world.size - 1))
    assert threaded.allgather_object(world.rank) == list(range(world.size))
    assert all(work.done() for work in works)  # gathering objects waits for all earlier operations
    for work in works:
        work.wait()
    for tensor in tensors:
        assert bool((tensor == world.size * (world.size - 1)).all())
    assert product.item() == 2**world.size
    assert root.item() == world.size - 1


@pytest.mark.ranks(2, 3, 4)
def test_random_collectives_equal_numpy_on_a_thread(world, threaded):
    fuzz(threaded, 100, seed=10 + world.size)


@pytest.mark.ranks(2, 3)
def test_errors_are_raised_by_the_operation_that_failed(world, threaded):
    wrong = threaded.allreduce_(torch.zeros(2), op=Op.BAND)
    unequal = threaded.allreduce_(torch.zeros(2 + world.rank))
    right = torch.ones(2)
    after = threaded.allreduce_(right)
    with pytest.raises(CommError, match="bitwise and must be of integers"):
        wrong.wait()
    with pytest.raises(MismatchError, match="the same calls"):
        unequal.wait()
    with pytest.raises(MismatchError, match="an earlier call has ended the communicator"):
        after.wait()
    assert right.tolist() == [1, 1]
    threaded.rejoin()
    threaded.allreduce_(right).wait()
    assert right.tolist() == [world.size] * 2
    with pytest.raises(MismatchError, match="rank 0: no"):
        threaded.agree(world.rank > 0, "no")


def test_operations_run_in_the_order_of_the_calls_and_close_waits_for_them():
    gate = Gate()
    threaded = ThreadedCommunicator(gate)
    works = [threaded.allreduce_(torch.zeros(k)) for k in range(5)]
    assert not any(work.done() for work in works)
    threaded.submit(gate.done.append, "composite")
    closing = threading.Thread(target=threaded.close)
    closing.start()
    gate.opened.set()
    closing.join()
    assert gate.done == [0, 1, 2, 3, 4, "composite", "close"]


def test_error_of_a_composite_is_raised_by_its_work():
    threaded = ThreadedCommunicator(SerialCommunicator())
    work = threaded.submit(int, "no number")
    with pytest.raises(ValueError, match="no number"):
        work.wait()
    threaded.close()
