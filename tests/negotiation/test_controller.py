"""The controller pairs operations by name, in any order of calls and from any thread."""

import random
import threading
import time

import pytest
import torch

from hpctrain.core.errors import CommError, HorovodInternalError, OperationMismatchError
from hpctrain.negotiation.request import Average, Kind, Request
from tests.negotiation.controlling import SEVERAL, SIZES, allreduce, broadcast, joined


@SIZES
def test_different_submission_orders_give_every_sum(controller):
    rank, size = controller.comm.rank, controller.comm.size
    for epoch in range(3):  # epoch 0 announces names, later epochs use cached slots
        names = [f"tensor {number}" for number in range(200)]
        random.Random(100 * rank + epoch).shuffle(names)
        handles = {}
        for name in names:
            number = int(name.split()[1])
            numel = 1 + 40 * number
            handles[name] = controller.submit(allreduce(name, torch.full((numel,), rank + number)))
        random.Random(rank).shuffle(names)
        for name in names:
            number = int(name.split()[1])
            (result,) = handles[name].wait()
            assert result.tolist() == [size * number + sum(range(size))] * (1 + 40 * number)


@SIZES
def test_unnamed_operations_are_paired_by_call_order_and_submit_never_blocks(controller):
    rank, size = controller.comm.rank, controller.comm.size
    if rank:
        controller.run(allreduce("first of the others", torch.ones(1)))
    handles = [
        controller.submit(allreduce(None, torch.tensor([rank + number])))
        for number in range(1500)  # more than the number of cache slots
    ]
    if not rank:
        controller.run(allreduce("first of the others", torch.ones(1)))
    joined(controller)
    total = sum(range(size))
    assert [h.wait()[0].item() for h in handles] == [total + size * n for n in range(1500)]


@SIZES
def test_unnamed_operations_of_two_kinds_need_no_common_order(controller):
    rank, size = controller.comm.rank, controller.comm.size
    sums, copies = [], []

    def submit_sums():
        requests = (allreduce(None, torch.tensor([rank + number])) for number in range(1100))
        sums.extend(map(controller.submit, requests))

    def submit_copies():
        requests = (broadcast(torch.tensor([rank + number])) for number in range(1100))
        copies.extend(map(controller.submit, requests))

    for submit in (submit_sums, submit_copies) if rank else (submit_copies, submit_sums):
        submit()
    total = sum(range(size))
    assert [h.wait()[0].item() for h in sums] == [total + size * n for n in range(1100)]
    assert [h.wait()[0].item() for h in copies] == list(range(1100))


@SIZES
def test_threads_submit_in_any_order(controller):
    rank, size = controller.comm.rank, controller.comm.size
    wrong = []

    def work(thread):
        for step in range(20):
            value = torch.full((thread + 1,), float(rank))
            (result,) = controller.run(allreduce(f"{thread}/{step}", value, Average))
            if not torch.equal(result, torch.full((thread + 1,), sum(range(size)) / size)):
                wrong.append((thread, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in random.Random(rank).sample(threads, 4):
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@SEVERAL
def test_a_mismatch_is_an_error_on_every_rank_and_later_operations_work(controller):
    rank, size = controller.comm.rank, controller.comm.size
    for _ in range(2):
        other = controller.submit(allreduce("other", torch.ones(5)))
        shape = (2, 3) if rank == size - 1 else (3, 2)
        with pytest.raises(
            OperationMismatchError, match=rf"wrong.*3, 2.*rank.*{size - 1}"
        ) as error:
            controller.run(allreduce("wrong", torch.ones(shape)))
        assert "2, 3" in str(error.value)
        assert other.wait()[0].tolist() == [size] * 5
        assert controller.run(allreduce("wrong", torch.ones(2)))[0].tolist() == [size] * 2


@SIZES
def test_a_name_in_flight_is_rejected(controller):
    if controller.comm.size == 1:
        return  # with one rank the operation completes in submit()
    if controller.comm.rank == 0:
        first = controller.submit(allreduce("twice", torch.ones(2)))
        with pytest.raises(HorovodInternalError, match="'twice' is already in flight"):
            controller.submit(allreduce("twice", torch.ones(2)))
        controller.run(Request(Kind.BARRIER, "go", ()))
    else:
        controller.run(Request(Kind.BARRIER, "go", ()))
        first = controller.submit(allreduce("twice", torch.ones(2)))
    assert first.wait()[0].tolist() == [controller.comm.size] * 2


@SEVERAL
def test_operations_on_a_rank_that_has_joined_are_an_error_at_once(controller):
    comm = controller.comm
    if comm.rank == 0:
        lasts = []
        joiners = [
            threading.Thread(target=lambda: lasts.append(joined(controller))) for _ in range(2)
        ]
        for joiner in joiners:
            joiner.start()
        while len(controller._progress.queue.joining) < 2:
            time.sleep(0.002)
        with pytest.raises(CommError, match="has joined must not submit"):
            controller.run(allreduce("too late", torch.ones(1)))
        comm.barrier()  # the other ranks join after this barrier
        for joiner in joiners:
            joiner.join()
        assert len(set(lasts)) == 1
    else:
        comm.barrier()
        lasts = [joined(controller)]
    assert lasts[0] > 0
