"""Check that ranks that wait detect lost ranks, and that busy ranks are not reported."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from mpi4py import MPI

from hpctrain.comm import blocks, node_processes
from hpctrain.comm.blocks import Block
from hpctrain.comm.liveness import Liveness
from hpctrain.comm.node_processes import NodeProcesses
from hpctrain.comm.waiting import LATE_S, Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import RankLostError
from tests.harness.pace import scaled


def presence_of(world: MPI.Intracomm) -> Liveness:
    return Liveness(world.Dup(), NodeProcesses.of(WatchedCalls(world, Watch())))


@pytest.mark.ranks(2, 3, 4)
def test_rank_that_left_is_reported_to_waiting_ranks(world: MPI.Intracomm) -> None:
    presence = presence_of(world)
    message = ""
    if world.rank != 1:
        end = time.monotonic() + 5
        while not message and time.monotonic() < end:
            try:
                presence.check()
            except RankLostError as error:
                message = str(error)
            time.sleep(0.02)
    presence.wait_for_end()
    assert world.rank == 1 or "but rank 1 left the program while rank" in message


@pytest.mark.ranks(3, 4)
def test_wait_for_one_rank_ignores_that_a_third_one_left(world: MPI.Intracomm) -> None:
    presence = presence_of(world)
    if world.rank == 0:
        time.sleep(1.5)
        presence.check(partners={1})
        with pytest.raises(RankLostError, match="rank 2 left"):
            presence.check(partners={2})
    elif world.rank == 1:
        world.recv(source=0)
    if world.rank == 0:
        world.send(None, 1)
    presence.wait_for_end()


@pytest.mark.ranks(2, 3, 4)
def test_farewell_waits_for_a_busy_rank_with_little_cpu_time(world: MPI.Intracomm) -> None:
    presence = presence_of(world)
    if world.rank == 0:
        time.sleep(2)
    start, used = time.monotonic(), time.process_time()
    presence.wait_for_end()
    waited_s, used_s = time.monotonic() - start, time.process_time() - used
    if world.rank != 0:
        assert waited_s > 1.5
        assert used_s < scaled(0.1) * waited_s


@pytest.mark.ranks(1, 2, 3, 4)
def test_farewell_gathers_texts_of_any_length_when_all_ranks_have_called(world) -> None:
    presence, output = presence_of(world), []

    def compare(gather):
        output.append(gather(b"x" * world.rank))
        output.append(gather(b""))
        return "alike"

    time.sleep(0.1 * world.rank)
    assert presence.wait_for_end(compare) == "alike"
    assert output == [[b"x" * rank for rank in range(world.size)], [b""] * world.size]
    assert not presence.wait_for_end(compare)


@pytest.mark.ranks(1, 2, 3, 4)
def test_no_rank_is_reported_before_a_farewell_and_no_message_is_left(
    world: MPI.Intracomm,
) -> None:
    presence = presence_of(world)
    presence.check()
    time.sleep(0.11)
    presence.check()
    world.Barrier()
    time.sleep(1.2 * (world.rank % 2))  # some ranks announce that they left, some do not
    presence.wait_for_end()
    assert not world.Iprobe()
    presence.check()
    presence.wait_for_end()


def test_ended_processes_and_reused_process_ids_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = subprocess.Popen(["sleep", "60"])
    pids = {0: os.getpid(), 1: process.pid}
    processes, other = NodeProcesses(pids, 0), NodeProcesses(pids, 0)
    processes.check()
    with monkeypatch.context() as patch:
        patch.setattr(node_processes, "birth", lambda _pid: 1)
        with pytest.raises(RankLostError, match="died"):
            other.check()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie counts as dead
    time.sleep(0.15)
    with pytest.raises(RankLostError, match=f"rank 1 .process {process.pid} of this node. died"):
        processes.check()
    process.wait()


def test_every_process_of_a_large_node_is_checked() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    processes = NodeProcesses({r: os.getpid() for r in range(40)} | {40: process.pid}, 0)
    missed = []
    for _ in range(5):
        try:
            processes.check()
        except RankLostError as error:
            missed.append(str(error))
        time.sleep(0.11)
    assert missed[0].startswith("rank 40 ")
    process.wait()


def test_processes_that_a_signal_has_stopped_are_listed_until_they_continue() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        processes = NodeProcesses({0: os.getpid(), 1: process.pid}, 0)
        found = []
        for number, event in (
            (signal.SIGSTOP, os.WSTOPPED),
            (signal.SIGCONT, os.WCONTINUED),
        ):
            process.send_signal(number)
            os.waitid(os.P_PID, process.pid, event)
            found.append(processes.stopped())
        process.kill()
    assert found == [{1: process.pid}, {}]


def error_of(check: Callable[[], None], limit_s: float) -> str:
    """Repeat ``check`` for ``limit_s``; return the text of its error."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            check()
        except RankLostError as error:
            return str(error)
        time.sleep(0.02)
    return ""


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("mine", "steps", "expected"),
    [
        ("inner", 0, "rank 0 has left a block of inner by ValueError"),
        ("outer", 0, ""),  # this rank has left the inner block before
        ("at end", 0, ""),  # as many steps as rank 0
        (
            "at end",
            1,
            "but rank 0 waits at the end of the block after 0 steps and rank {} is in step 1",
        ),
    ],
)
def test_only_ranks_in_the_block_raise_if_rank_0_leaves_it_or_waits_at_its_end(
    world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, mine: str, steps: int, expected: str
) -> None:
    monkeypatch.setattr(blocks, "BREAK_S", 0.2)
    presence, is_first = presence_of(world), world.rank == 0
    limit_s = 5 if expected and not is_first else 0.7
    presence.blocks.enter(Block("outer", lambda: 0))
    number = presence.blocks.enter(Block("inner", lambda: 0 if is_first else steps))
    assert presence.blocks.innermost == "inner"
    world.Barrier()
    if mine == "at end":
        with presence.blocks.at_end(number) if is_first else nullcontext():
            found = error_of(presence.check, limit_s)
    else:
        if is_first or mine == "outer":
            presence.blocks.leave(number, ValueError("no samples") if is_first else None)
            assert presence.blocks.innermost == "outer"
        found = error_of(presence.check, limit_s)
    presence.wait_for_end()
    assert (expected.format(world.rank) in found) if expected and not is_first else not found


HOSTS = {0: "n0", 1: "n1", 2: "n2"}


def test_late_rank_is_reported_once_with_its_node_and_the_rail(caplog):
    watch = Watch(hosts=HOSTS, rank=0)
    with caplog.at_level(logging.WARNING):
        for waited_s in (0.1, LATE_S + 0.1, LATE_S + 0.2):
            watch.look(waited_s, 1, "rail 0")
        watch.look(LATE_S + 0.1, 1, "rail 0")
        watch.look(100.0)  # waits inside a node are not reported
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "rank 0 on n0 has waited 3 s for rank 1 on n1 over rail 0; that rank is busy"
    )


def test_wait_beyond_the_timeout_raises_with_the_awaited_rank():
    watch = Watch(hosts=HOSTS, rank=2, timeout_s=7)
    watch.look(6.9, 1, "rail 1")
    with pytest.raises(RankLostError, match=r"rank 2 on n2 .* 8 s for rank 1 on n1 over rail 1"):
        watch.look(8.0, 1, "rail 1")
    with pytest.raises(RankLostError, match=r"within HPCTRAIN_TIMEOUT=7 s, but .* other ranks;"):
        watch.look(8.0)


def test_a_lost_rank_is_found_first():
    def lost(ranks):
        raise RankLostError(f"one of {ranks} died")

    with pytest.raises(RankLostError, match=r"one of \(3,\) died"):
        Watch(lost, timeout_s=1).look(5.0, 3)
    with pytest.raises(RankLostError, match=r"one of \[2, 3\] died"):
        Watch(lost, timeout_s=1).of_group([2, 3]).look(5.0)
