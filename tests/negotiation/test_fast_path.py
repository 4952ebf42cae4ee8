"""Repeated operations skip control messages, on one or several nodes, with the same results."""

import json
import random
import signal
import threading
import time

import pytest
import torch

from hpctrain.comm.observed import Statistics, observed
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, HorovodInternalError
from hpctrain.core.libc import Timer
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.engine_driver import EngineDriver
from hpctrain.negotiation.fast_path import NodeCommit
from hpctrain.negotiation.request import Average, Kind, Max, Product, Request, Sum
from hpctrain.negotiation.stall import LastCall, SetMember, StallWatch
from hpctrain.negotiation.timeline import Timelines
from tests.comm.conftest import PATHS, SAME, connected
from tests.negotiation.controlling import (
    RUNS,
    SEVERAL,
    allreduce,
    controller_of,
    joined,
    run_now,
)
from tests.processes import wait_until


@pytest.fixture(scope="module", params=sorted({"one node", "nodes of one", "nodes of two"} - SAME))
def ranks(request):
    """Communicator of all ranks, on one node or several."""
    with connected(PATHS[request.param]) as connection:
        yield connection.comm


@pytest.fixture
def controller(ranks):
    """A controller over all ranks."""
    made = controller_of(ranks.group(range(ranks.size)))
    yield made
    ranks.barrier()
    made.close()


def num_commits(controller):
    return controller._progress.fast_path.commit.num_commits


def requests_of(rank, size):
    """Return one request of each kind."""
    row = torch.full((size + 1, 2), float(rank + 1))
    group = [torch.full((number + 1, 2), float(rank)) for number in range(5)]
    return [
        Request(Kind.ALLREDUCE, "mean", [row], op=Average),
        Request(Kind.ALLREDUCE, "in place", [row.clone()], in_place=True, op=Sum),
        Request(Kind.ALLREDUCE, "strided", [row.t()], op=Sum, prescale=3.0, postscale=0.5),
        Request(Kind.ALLREDUCE, "gradient", [row.clone().requires_grad_()], op=Product),
        Request(Kind.ALLREDUCE, "one of many", group, op=Max),
        Request(Kind.BROADCAST, "copy", [row.t()], root=size - 1),
        Request(Kind.ALLGATHER, "rows", [row[:rank]]),
        Request(Kind.REDUCESCATTER, "part", [row], op=Sum),
        Request(Kind.REDUCESCATTER, "integers", [row.to(torch.int16)], op=Average),
        Request(Kind.BARRIER, "barrier", ()),
    ]


@SEVERAL
def test_repeated_operations_of_every_kind_have_the_same_bits_on_the_fast_path(controller):
    rank, size = controller.comm.rank, controller.comm.size
    by_mail = [controller.run(request) for request in requests_of(rank, size)]
    assert num_commits(controller) == 0
    for start in (controller.run, lambda request: controller.submit(request).wait()):
        controller.comm.barrier()  # so that no rank waits until rank 0 polls for control messages
        before = num_commits(controller)
        again = [start(request) for request in requests_of(rank, size)]
        assert num_commits(controller) > before + len(again) - 3
        for some, others in zip(by_mail, again, strict=True):
            assert all(torch.equal(*pair) for pair in zip(some, others, strict=True))


FLOATS = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float64, torch.complex64)
INTEGERS = (torch.bool, torch.uint8, torch.uint32, torch.int64)


@SEVERAL
def test_every_dtype_has_the_same_bits_on_the_fast_path(controller):
    values = (
        torch.randn(333, generator=torch.Generator().manual_seed(controller.comm.rank)).abs() * 9
    )
    for dtype in FLOATS + INTEGERS:
        op = Max if dtype is torch.bool else Average
        request = Request(Kind.ALLREDUCE, str(dtype), [values.to(dtype)], op=op)
        before = num_commits(controller)
        results = [controller.run(request)[0].view(torch.uint8) for _ in range(5)]
        assert num_commits(controller) > before
        assert all(torch.equal(result, results[0]) for result in results)


class Own(torch.Tensor):
    """A user-defined subclass of Tensor."""


@SEVERAL
def test_small_tensors_of_any_layout_are_reduced_by_value(controller):
    rank = controller.comm.rank
    pair = torch.tensor([1 + rank * 1j, 2 - rank * 2j])
    given = {
        # a view with the negative bit: the stored bytes have the opposite sign
        "negative": pair.conj().imag[:1],
        "apart": torch.arange(6.0).view(2, 3)[:, 1] * (rank + 1),
        "turned": torch.arange(6.0).view(2, 3).t() + rank,
        "spread": torch.tensor([1.0 + rank]).expand(3),
        "own": torch.ones(2).mul_(rank).as_subclass(Own),
        "weights": torch.nn.Parameter(torch.full((2,), rank + 0.5)),
        "none": torch.ones(0),
    }
    assert given["negative"].is_neg()
    for name, tensor in given.items():
        summed = torch.tensor(controller.comm.allgather_object(tensor.detach().tolist())).sum(0)
        before = num_commits(controller)
        for _ in range(5):
            # so that no rank waits until rank 0 polls for control messages
            controller.comm.barrier()
            (found,) = controller.run(Request(Kind.ALLREDUCE, name, [tensor], op=Sum))
            assert found.tolist() == summed.tolist(), name
        assert num_commits(controller) > before, name


@SEVERAL
def test_an_operation_with_a_prompt_wait_wakes_no_thread(ranks, monkeypatch):
    names = []
    drive = EngineDriver._drive

    def noted(self, is_over):
        names.append(threading.current_thread().name)
        drive(self, is_over)

    monkeypatch.setattr(EngineDriver, "_drive", noted)
    made = controller_of(ranks.group(range(ranks.size)), cycle_s=0.5)
    start = time.monotonic()
    for _ in range(100):
        made.submit(allreduce("soon", torch.ones(2))).wait()
    if time.monotonic() - start < 0.9:
        assert "hpctrain-named" not in names
    made.close()


@SEVERAL
def test_a_loop_with_waits_rarely_sets_the_timer_and_unawaited_operations_complete(
    controller, monkeypatch
):
    times, set_timer = [], Timer.set

    def noted(self, seconds):
        times.append(seconds)
        set_timer(self, seconds)

    monkeypatch.setattr(Timer, "set", noted)
    value, start = torch.ones(2), time.monotonic()
    for _ in range(200):
        assert controller.submit(allreduce("again", value.fill_(1))).wait()[0] is value
    # otherwise the timer may expire before an operation completes
    if time.monotonic() - start < 0.2:
        assert len(times) < 100
    assert all(times)  # the timer is never disarmed
    alone = controller.submit(allreduce("again", value.fill_(1)))
    assert wait_until(alone.done, 5)
    assert value.tolist() == [controller.comm.size] * 2


@SEVERAL
def test_timeline_and_statistics_include_fast_path_operations(ranks, tmp_path):
    count = Statistics(ranks)
    comm = observed(ranks.group(range(ranks.size)), count)
    timelines = Timelines(ranks.rank, ranks.size)
    timelines.start(tmp_path / "{rank}.json")
    last_call = LastCall()
    members = [SetMember(rank, "here") for rank in range(ranks.size)]
    stalls = StallWatch(Settings(), ranks.rank, members, last_call)
    made = Controller(comm, timelines=timelines, stalls=stalls)
    for _ in range(20):
        assert made.run(allreduce("x", torch.ones(2)))[0].tolist() == [ranks.size] * 2
    assert num_commits(made) > 10
    assert last_call.describe()[0] == "allreduce x"
    timelines.stop()
    made.close()
    assert count.counts["allreduce_"].calls == 20
    titles = [
        event["name"]
        for event in json.loads((tmp_path / f"{ranks.rank}.json").read_text())
        if event["ph"] == "B"
    ]
    for title in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE"):
        assert titles.count(title) == 20


def waiting(controller, errors, run):
    """Cache an operation on all ranks, then return a thread that waits in it for rank 0."""
    for _ in range(3):
        run(controller, "again", torch.ones(2))

    def wait():
        try:
            run(controller, "again", torch.ones(2))
        except CommError as error:
            errors.append(str(error))

    controller.comm.barrier()
    caller = threading.Thread(target=wait)
    if controller.comm.rank:
        caller.start()
    time.sleep(0.1)
    return caller


@SEVERAL
@RUNS
@pytest.mark.parametrize("breaker", [0, 1])
def test_break_off_ends_the_wait_of_prepared_ranks(ranks, breaker, run):
    made, errors = controller_of(ranks), []
    caller = waiting(made, errors, run)
    if made.comm.rank == breaker:
        made.break_off("enough")
    if made.comm.rank:
        caller.join(30)
        assert not caller.is_alive()
        assert errors == ["enough"]
    made.abandon()
    after = controller_of(ranks)
    for _ in range(3):  # the ranks are still in step
        assert after.run(allreduce("again", torch.ones(2)))[0].tolist() == [ranks.size] * 2
    after.abandon()


@SEVERAL
@RUNS
def test_close_ends_the_wait_of_prepared_ranks(ranks, run):
    made, errors = controller_of(ranks.group(range(ranks.size))), []
    caller = waiting(made, errors, run)
    made.close()
    if ranks.rank:
        caller.join(30)
        assert not caller.is_alive()
        assert "shut down" in errors[0]


@SEVERAL
@RUNS
def test_a_rank_that_joins_completes_operations_that_others_have_prepared(controller, run):
    size, errors = controller.comm.size, []
    caller = waiting(controller, errors, run)
    if controller.comm.rank:
        caller.join(0.05)
    else:
        lasts = joined(controller)
    if controller.comm.rank:
        caller.join(30)
        assert not caller.is_alive()
        lasts = joined(controller)
    assert not errors
    assert lasts > 0
    assert controller.run(allreduce("again", torch.ones(2)))[0].tolist() == [size] * 2


@SEVERAL
def test_sums_by_one_call_of_the_kernel_have_the_same_bits(controller):
    comm, rng = controller.comm, random.Random(5)
    uses_kernel = controller._progress.fast_path._kernel is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        for numel in (1, 2, 1000, 5000):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)) * 9
            expected = controller.run(allreduce("sum", values.to(dtype, copy=True)))[0]
            for _ in range(rng.randrange(4, 8)):
                found, before = values.to(dtype, copy=True), num_commits(controller)
                comm.barrier()
                assert torch.equal(run_now(controller, "sum", found), expected)
                assert found._version > 0
            assert num_commits(controller) > before or not uses_kernel


@SEVERAL
def test_random_sums_with_late_ranks_threads_and_layouts_are_exact(controller):
    comm = controller.comm
    program, own = random.Random(11), random.Random(comm.rank)
    size, total = comm.size, sum(range(comm.size))
    for step in range(150):
        kind, numel = program.choice(["now"] * 6 + ["strided", "late", "async"]), 1 + step % 3
        late = program.randrange(size)
        if kind == "late" and comm.rank == late:
            time.sleep(own.random() * 2e-3)
        others = (
            []
            if kind != "async"
            else [
                controller.submit(allreduce(f"other {i}", torch.full((3,), float(comm.rank))))
                for i in program.sample(range(3), 3)
            ]
        )
        tensor = torch.full((numel, 2), float(comm.rank + step))
        tensor = tensor[:, 0] if kind == "strided" else tensor[:, 0].contiguous()
        found = run_now(controller, f"sum of {numel}", tensor)
        assert found is tensor
        assert tensor.tolist() == [total + size * step] * numel
        assert all(other.wait()[0].tolist() == [total] * 3 for other in others)


@SEVERAL
def test_tensors_of_inference_mode_have_one_outcome_on_all_ranks(ranks, controller):
    with torch.inference_mode():
        tensor = torch.ones(2)
    for step in range(8):
        if step % ranks.size == ranks.rank:
            time.sleep(2e-3)
        is_done = True
        try:
            run_now(controller, "created in inference mode", tensor)
        except (RuntimeError, CommError):
            is_done = False
        assert len({*ranks.allgather_object(is_done)}) == 1


@SEVERAL
def test_a_signal_handler_may_use_the_controller_during_a_reduction(controller, monkeypatch):
    record = NodeCommit.record

    def noted(self, code, word):
        signal.raise_signal(signal.SIGUSR2)
        return record(self, code, word)

    def handler(*_):
        controller._driver.nudge()
        controller._driver.look()

    monkeypatch.setattr(NodeCommit, "record", noted)
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        for _ in range(10):
            tensor = run_now(controller, "again", torch.ones(2))
            assert tensor.tolist() == [controller.comm.size] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


@SEVERAL
def test_threads_that_reduce_at_once_get_their_own_sums(controller):
    size, wrong = controller.comm.size, []

    def reduce(thread):
        try:
            for step in range(60):
                value = float(thread + step)
                found = run_now(controller, f"of thread {thread}", torch.full((2,), value))
                wrong.extend({*found.tolist()} - {value * size})
        except CommError as error:
            wrong.append(error)

    threads = [threading.Thread(target=reduce, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@SEVERAL
def test_a_different_shape_under_a_cached_name_is_an_error_on_every_rank(controller):
    rank, size = controller.comm.rank, controller.comm.size
    for odd in range(size):
        for _ in range(3):
            run_now(controller, "known", torch.ones(2))
        numel = 3 if rank == odd else 2
        with pytest.raises(HorovodInternalError, match="must be the same on all ranks"):
            run_now(controller, "known", torch.ones(numel))
