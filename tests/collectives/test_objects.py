"""Check that objects of any size are sent between ranks, concurrently with other operations."""

import threading

import pytest
import torch

from hpctrain.collectives.objects import FIRST_BYTES
from hpctrain.core.errors import HorovodInternalError

SIZES = pytest.mark.ranks(1, 2, 3, 4)
LENGTHS = [0, 1, FIRST_BYTES - 20, FIRST_BYTES - 8, FIRST_BYTES, FIRST_BYTES + 1, 1 << 20]


@SIZES
@pytest.mark.parametrize("length", LENGTHS)
def test_an_object_of_any_size_reaches_every_rank(hvd, length):
    for root in range(hvd.size()):
        value = {"from": hvd.rank(), "bytes": bytes([hvd.rank()]) * length}
        expected = {"from": root, "bytes": bytes([root]) * length}
        received = hvd.broadcast_object(value, root_rank=root)
        assert received == expected
        assert (received is value) == (hvd.rank() == root)


@SIZES
def test_objects_of_all_ranks_reach_every_rank(hvd):
    lengths = [LENGTHS[rank % len(LENGTHS)] for rank in range(hvd.size())]
    received = hvd.allgather_object("x" * lengths[hvd.rank()])
    assert received == ["x" * length for length in lengths]


@SIZES
def test_functions_are_broadcast(hvd):
    number = hvd.rank() + 5
    assert hvd.broadcast_object(lambda: number)() == 5
    assert [f() for f in hvd.allgather_object(lambda: number)] == list(range(5, 5 + hvd.size()))


@SIZES
def test_objects_are_exchanged_with_operations_in_flight(hvd):
    sums = [
        hvd.allreduce_async(torch.ones(3), name=str(number), op=hvd.Sum)
        for number in sorted(range(8), reverse=bool(hvd.rank() % 2))
    ]
    assert hvd.broadcast_object(hvd.rank()) == 0
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    assert all(hvd.synchronize(handle).tolist() == [hvd.size()] * 3 for handle in sums)


@SIZES
def test_threads_name_their_objects(hvd):
    received = {}

    def ask(name):
        received[name] = hvd.broadcast_object((name, hvd.rank()), name=name)

    names = sorted("abc", reverse=bool(hvd.rank() % 2))
    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == {name: (name, 0) for name in names}


@SIZES
def test_object_that_cannot_be_pickled_raises_on_every_rank(hvd):
    last = hvd.size() - 1
    value = threading.Lock() if hvd.rank() == last else 1
    for call in (lambda: hvd.broadcast_object(value, last), lambda: hvd.allgather_object(value)):
        with pytest.raises(HorovodInternalError, match=f"rank {last} cannot pickle its lock"):
            call()
    assert hvd.broadcast_object(hvd.rank()) == 0


@pytest.mark.ranks(2, 3, 4)
def test_objects_stay_in_their_process_set(hvd):
    sets = [hvd.add_process_set(range(start, hvd.size(), 2)) for start in range(2)]
    mine = sets[hvd.rank() % 2]
    assert hvd.broadcast_object(hvd.rank(), mine.ranks[-1], process_set=mine) == mine.ranks[-1]
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == mine.ranks
