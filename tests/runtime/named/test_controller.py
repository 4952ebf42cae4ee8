"""The controller: operations find each other by name, whatever thread asks for them and when."""

import os
import random
import signal
import threading
import time

import pytest
import torch

from hpctrain.comm.factory import connect
from hpctrain.comm.joining import find_world
from hpctrain.errors import CommError, HorovodInternalError, OperationMismatchError
from hpctrain.runtime.named.controller import Controller
from hpctrain.runtime.named.reduce_op import Average, Max, Sum
from hpctrain.runtime.named.request import Kind, Request
from tests.comm.conftest import PATHS, close

SIZES = pytest.mark.ranks(1, 2, 3, 4)
SEVERAL = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=["flat MPI", "one node", "nodes of two"])
def controller(request):
    """Make a controller by each path in turn."""
    connection = connect(find_world(), PATHS[request.param])
    made = Controller(connection.comm.group(range(connection.comm.size)))
    yield made
    connection.comm.barrier()
    made.close()
    close(connection)


def allreduce(name, tensor, op=Sum):
    return Request(Kind.ALLREDUCE, name, [tensor], in_place=True, op=op)


@SIZES
def test_other_orders_on_every_rank_give_every_sum(controller):
    rank, size = controller.comm.rank, controller.comm.size
    for epoch in range(3):  # the names are new, then known
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
def test_synchronous_and_asynchronous_ones_mix(controller):
    rank, size = controller.comm.rank, controller.comm.size
    early = controller.submit(allreduce("early" if rank else "late", torch.tensor([1.0])))
    (now,) = controller.run(allreduce("now", torch.tensor([float(rank)]), Max))
    late = controller.submit(allreduce("late" if rank else "early", torch.tensor([1.0])))
    assert now.item() == size - 1
    assert early.wait()[0].item() == late.wait()[0].item() == size
    assert early.done()
    assert late.done()


@SIZES
def test_without_names_the_order_of_the_calls_counts(controller):
    rank, size = controller.comm.rank, controller.comm.size
    handles = [
        controller.submit(allreduce(None, torch.tensor([rank + number])))
        for number in range(1500)  # more than there are numbers
    ]
    total = sum(range(size))
    assert [h.wait()[0].item() for h in handles] == [total + size * n for n in range(1500)]


@SIZES
def test_what_nobody_waits_for_is_done_by_and_by(controller):
    handle = controller.submit(allreduce("alone", torch.ones(3)))
    end = time.monotonic() + 20
    while not handle.done() and time.monotonic() < end:
        time.sleep(0.002)
    assert handle.done()


@SIZES
def test_threads_ask_in_any_order(controller):
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
def test_a_mismatch_is_an_error_on_every_rank_and_work_goes_on(controller):
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
def test_a_name_under_way_is_refused(controller):
    if controller.comm.size == 1:
        return  # there it is done at once
    if controller.comm.rank == 0:
        first = controller.submit(allreduce("twice", torch.ones(2)))
        with pytest.raises(HorovodInternalError, match="'twice' is under way"):
            controller.submit(allreduce("twice", torch.ones(2)))
        controller.run(Request(Kind.BARRIER, "go", ()))
    else:
        controller.run(Request(Kind.BARRIER, "go", ()))
        first = controller.submit(allreduce("twice", torch.ones(2)))
    assert first.wait()[0].tolist() == [controller.comm.size] * 2


@SIZES
def test_who_has_joined_takes_part_with_nothing(controller):
    rank, size = controller.comm.rank, controller.comm.size
    for _ in range(2):
        for step in range(3 * (rank + 1)):
            there = [r for r in range(size) if step < 3 * (r + 1)]
            (total,) = controller.run(allreduce(f"step {step}", torch.tensor([rank + 1])))
            assert total.item() == sum(r + 1 for r in there)
            (most,) = controller.run(allreduce(f"max {step}", torch.tensor([-rank - 1]), Max))
            assert most.item() == -min(there) - 1
            controller.run(allreduce(None, torch.tensor([rank])))
        assert controller.join() == size - 1
        (total,) = controller.run(allreduce(None, torch.tensor([1])))
        assert total.item() == size


@SEVERAL
def test_breaking_off_brings_everybody_out(controller):
    if controller.comm.rank == 0:
        time.sleep(0.2)
        controller.break_off("no more of this")
    with pytest.raises(HorovodInternalError, match="no more of this"):
        controller.run(allreduce(f"of rank {controller.comm.rank}", torch.ones(1)))
    comm = controller.comm
    comm.barrier()
    controller.abandon()
    again = Controller(comm)
    assert again.run(allreduce("again", torch.ones(1)))[0].item() == comm.size
    comm.barrier()
    again.abandon()


@SIZES
def test_closing_fails_what_is_under_way(controller):
    connection_comm = controller.comm
    other = Controller(connection_comm.group(range(connection_comm.size)))
    handle = other.submit(allreduce(f"of rank {connection_comm.rank}", torch.ones(1)))
    connection_comm.barrier()
    other.close()
    if connection_comm.size > 1:
        with pytest.raises(HorovodInternalError, match="shut down"):
            handle.wait()
    with pytest.raises(HorovodInternalError, match="shut down"):
        other.submit(allreduce("late", torch.ones(1)))


@SEVERAL
def test_a_caller_who_waits_announces_what_other_threads_submit(controller):
    start = time.monotonic()
    first, second = allreduce("first", torch.ones(1)), allreduce("second", torch.ones(1))
    for _ in range(4):
        if controller.comm.rank == 0:
            other = threading.Timer(0.05, controller.submit, [second])
            other.start()
            controller.run(first)
            other.join()
        else:
            controller.run(second)
            controller.run(first)
    assert time.monotonic() - start < 2.5  # not a tick for each


@SEVERAL
def test_callers_who_leave_together_hand_on_what_is_under_way(controller):
    start = time.monotonic()
    for _ in range(4):
        late = (
            controller.submit(allreduce("late", torch.ones(1))) if not controller.comm.rank else 0
        )
        callers = [
            threading.Thread(target=controller.run, args=(allreduce(name, torch.ones(1)),))
            for name in ("one", "other")
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        if late:
            while not late.done():  # the thread of the controller does it
                time.sleep(0.002)
        else:
            controller.run(allreduce("late", torch.ones(1)))
    assert time.monotonic() - start < 2.5


@SEVERAL
def test_threads_of_a_rank_that_has_joined_hear_at_once_that_it_has(controller):
    comm = controller.comm
    if comm.rank == 0:
        lasts = []
        joiners = [
            threading.Thread(target=lambda: lasts.append(controller.join())) for _ in range(2)
        ]
        for joiner in joiners:
            joiner.start()
        while len(controller._progress._joining) < 2:
            time.sleep(0.002)
        with pytest.raises(CommError, match="has joined takes no part"):
            controller.run(allreduce("too late", torch.ones(1)))
        comm.barrier()  # only now the others join
        for joiner in joiners:
            joiner.join()
        assert len(set(lasts)) == 1
    else:
        comm.barrier()
        lasts = [controller.join()]
    assert lasts[0] > 0


@SEVERAL
def test_a_join_comes_after_operations_that_wait_for_a_number(controller):
    size = controller.comm.size
    handles = [controller.submit(allreduce(None, torch.ones(1))) for _ in range(1100)]
    controller.join()
    assert {handle.wait()[0].item() for handle in handles} == {size}


@SIZES
def test_closing_carries_out_what_all_have_submitted_or_some_not(controller):
    comm = controller.comm
    rank, size = comm.rank, comm.size
    chance = random.Random(rank)
    for epoch in range(4):
        other = Controller(comm.group(range(size)))
        num_named = 1100 if epoch == 3 else 30
        handles = [
            other.submit(allreduce(None if n % 2 else f"{n}", torch.ones(1)))
            for n in range(num_named)
        ]
        alone = Request(Kind.ALLREDUCE, f"of rank {rank}", [torch.ones(1)], op=Sum)
        errors = []

        def wait_in_vain(alone=alone, errors=errors, other=other):
            try:
                other.run(alone)
            except HorovodInternalError as error:
                errors.append(str(error))

        caller = threading.Thread(target=wait_in_vain)
        caller.start()
        while not (other._progress.names.oldest().get(alone.name) or size == 1):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.003)
        other.close()
        other.close()
        assert all(handle.is_done for handle in handles)
        caller.join(20)
        assert not caller.is_alive()
        assert size == 1 or "shut down" in errors[0]


@SEVERAL
def test_an_interrupted_rank_fails_for_all_its_threads(controller):
    errors = []

    def wait():
        try:
            controller.run(allreduce(f"other of {controller.comm.rank}", torch.ones(1)))
        except HorovodInternalError as error:
            errors.append(str(error))

    caller = threading.Thread(target=wait)
    main = threading.main_thread().ident
    threading.Timer(0.1, caller.start).start()
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        controller.run(allreduce(f"of {controller.comm.rank}", torch.ones(1)))
    caller.join(20)
    assert not caller.is_alive()
    assert "cut short by KeyboardInterrupt" in errors[0]
    with pytest.raises(HorovodInternalError, match="cut short"):
        controller.submit(allreduce("more", torch.ones(1)))


@SEVERAL
def test_a_forked_child_closes_nothing(controller):
    child = os.fork()
    if child == 0:
        controller.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert controller.run(allreduce("still", torch.ones(1)))[0].item() == controller.comm.size


@SEVERAL
def test_breaking_off_in_the_midst_of_work_leaves_nobody_behind(controller):
    comm = controller.comm
    chance = random.Random(0)  # the same on every rank
    for _ in range(8):
        current = Controller(comm)
        end = threading.Timer(chance.random() * 0.004, current.break_off, ["enough"])
        if comm.rank == chance.randrange(comm.size):
            end.start()
        with pytest.raises(HorovodInternalError, match="enough"):
            while True:
                handle = current.submit(allreduce("early", torch.ones(2)))
                assert current.run(allreduce("sync", torch.ones(1)))[0].item() == comm.size
                assert handle.wait()[0].tolist() == [comm.size] * 2
        if end.is_alive():
            end.join()
        current.abandon()
