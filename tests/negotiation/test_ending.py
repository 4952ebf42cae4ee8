"""The controller: hand-over between threads, and the end without deadlocks."""

import os
import random
import signal
import threading
import time

import pytest
import torch

from hpctrain.core.errors import HorovodInternalError
from hpctrain.negotiation.request import Kind, Request, Sum
from tests.harness.pace import scaled
from tests.negotiation.controlling import SEVERAL, SIZES, allreduce, controller_of
from tests.processes import wait_until


@SEVERAL
def test_a_waiting_caller_announces_operations_of_other_threads(controller):
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
    assert time.monotonic() - start < scaled(2.5)  # faster than one controller cycle per operation


@SEVERAL
def test_an_operation_without_a_waiting_caller_completes(controller):
    lonely = allreduce("lonely", torch.ones(2))
    if controller.comm.rank == 0:
        handle = controller.submit(lonely)
        # is_done, because done() may drive the operation itself
        assert wait_until(lambda: handle.is_done, 20)
    else:
        assert controller.run(lonely)[0].tolist() == [controller.comm.size] * 2


@SEVERAL
def test_callers_that_return_together_hand_over_operations_in_flight(controller):
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
            while not late.done():  # completed by the controller's thread
                time.sleep(0.002)
        else:
            controller.run(allreduce("late", torch.ones(1)))
    assert time.monotonic() - start < scaled(2.5)


@SEVERAL
@pytest.mark.parametrize("joining", ["the first", "all but the first", "all, the first late"])
def test_close_ends_after_ranks_have_joined(controller, joining):
    comm, start = controller.comm, time.monotonic()
    for _ in range(3):
        other = controller_of(comm.group(range(comm.size)))
        other.run(Request(Kind.BARRIER, "all are here", ()))
        if joining.startswith("all,") or (comm.rank == 0) == (joining == "the first"):
            time.sleep(0.0 if comm.rank else 0.05)
            other.start_join()
        time.sleep(0.1 if comm.rank == comm.size - 1 else 0.0)
        other.close()
    assert time.monotonic() - start < scaled(5)  # less than the timeout for the other ranks


@SIZES
def test_close_completes_common_operations_and_fails_all_others(controller):
    comm = controller.comm
    rank, size = comm.rank, comm.size
    chance = random.Random(rank)
    for epoch in range(4):
        other = controller_of(comm.group(range(size)))
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
        while not (other._progress.queue.oldest().get(alone.name) or size == 1):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.003)
        other.close()
        other.close()
        assert all(handle.is_done for handle in handles)
        caller.join(20)
        assert not caller.is_alive()
        assert size == 1 or "shut down" in errors[0]
        with pytest.raises(HorovodInternalError, match="shut down"):
            other.submit(allreduce("late", torch.ones(1)))


@SEVERAL
def test_an_interrupt_fails_the_operations_of_all_threads_of_a_rank(controller):
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
    assert "must not be interrupted, but KeyboardInterrupt" in errors[0]
    assert f"in an operation of rank {controller.comm.rank};" in errors[0]
    with pytest.raises(HorovodInternalError, match="must not be interrupted"):
        controller.submit(allreduce("more", torch.ones(1)))


@SEVERAL
def test_close_in_a_forked_child_has_no_effect(controller):
    child = os.fork()
    if child == 0:
        controller.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert controller.run(allreduce("still", torch.ones(1)))[0].item() == controller.comm.size


@SEVERAL
def test_break_off_at_random_times_ends_all_ranks(controller):
    comm = controller.comm
    chance = random.Random(0)  # the same seed on every rank
    for _ in range(8):
        current = controller_of(comm)
        end = threading.Timer(chance.random() * 0.004, current.break_off, ["enough"])
        if comm.rank == chance.randrange(comm.size):
            end.start()
        error = ""
        while not error:
            try:
                handle = current.submit(allreduce("early", torch.ones(2)))
                assert current.run(allreduce("sync", torch.ones(1)))[0].item() == comm.size
                assert handle.wait()[0].tolist() == [comm.size] * 2
            except HorovodInternalError as broken:
                error = str(broken)
        assert error == "enough"
        if end.is_alive():
            end.join()
        current.abandon()
