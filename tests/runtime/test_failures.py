"""A failure of one rank ends all ranks within five seconds, with a non-zero code and a reason."""

import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpctrain
from hpctrain.cluster.env import RANK_LOST
from hpctrain.launch.mpirun import find_mpirun
from hpctrain.runtime.abort import INTERRUPTED
from tests.runtime.victims import Outcome, run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """The program of rank 1 while the other ranks train, and the expected output on stderr."""

    body: str
    num_ranks: int = 2
    nodes: int = 1
    message: tuple[str, ...] = ()
    logged: str = ""  # in the log file of any rank
    num_tracebacks: int = 0


RAISED = ("victim.py:", ': raise ValueError("bad luck")', "[rank 1] ValueError: bad luck")
LEFT = ("rank 1 left the program",)
CASES = {
    "an exception": Case(
        body="""
        now()
        raise ValueError("bad luck")
        """,
        message=RAISED,
        logged="[rank 1] Traceback (most recent call last):",
    ),
    "an exception in a thread that communicates": Case(
        body="""
        def work():
            hvd.allreduce_async(torch.ones(1), name="of one rank")
            now()
            raise ValueError("bad luck")
        threading.Thread(target=work).start()
        """,
        message=RAISED,
    ),
    "an exception in a thread that computes": Case(
        body="""
        def work(model):
            now()
            raise ValueError("bad luck")
        threading.Thread(target=work, args=(torch.nn.Linear(1, 1),)).start()
        """,
        message=RAISED,
        logged="[rank 1] Traceback (most recent call last):",
    ),
    # With two nodes, one rank waits on the node of the lost rank and one on the other node.
    "a word": Case(
        body="now(); sys.exit()", num_ranks=3, nodes=2, message=LEFT, logged="RankLostError"
    ),
    "a crash in native code": Case(
        body="""
        import ctypes
        def crash():
            now()
            ctypes.string_at(0)
        crash()
        """,
        message=("[rank 1] Fatal Python error: Segmentation fault", "in crash"),
        logged="[rank 1] Fatal Python error: Segmentation fault",
    ),
    "an interrupt that the program catches": Case(
        body="""
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            hvd.allreduce_(torch.ones(1), name="of rank 1")
        except KeyboardInterrupt:
            now(); sys.exit()
        """,
        message=("rank 1 left the program after KeyboardInterrupt in a call while rank 0 waits",),
    ),
    "a kill": Case(body="now(); os.kill(os.getpid(), signal.SIGKILL)"),
    "a kill that mpirun is slow to tell of": Case(
        body="now(); os.kill(os.getpid(), signal.SIGKILL)", num_ranks=3, nodes=2
    ),
}


AT_LENGTH = pytest.param("an exception in a thread that computes", marks=pytest.mark.conformance)


@pytest.mark.parametrize("name", [*sorted(CASES.keys() - {*AT_LENGTH.values}), AT_LENGTH])
def test_the_end_of_one_rank_ends_all_with_a_reason(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ignored = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if "slow" in name else ""
    body = indented("train(steps=2)\n" + case.body)
    outcome = run_ranks(
        tmp_path,
        f"{ignored}if rank == 1:\n{body}\ntrain()",
        num_ranks=case.num_ranks,
        nodes=case.nodes,
    )
    assert_ended(outcome)
    for text in case.message:
        assert text in outcome.err
    assert any(case.logged in log for log in outcome.logs.values())
    if name == "a kill":
        assert_named(outcome)
    assert outcome.err.count("Traceback") == case.num_tracebacks, outcome.err


def indented(body: str) -> str:
    return "\n".join(f"    {line.removeprefix('        ')}" for line in body.splitlines())


def assert_named(outcome: Outcome) -> None:
    """Check that the lost rank is named; MPICH's launcher names only a process."""
    assert "rank 1" in outcome.err or not find_mpirun().is_openmpi


def assert_ended(outcome: Outcome, limit_s: float = LIMIT_S) -> None:
    assert outcome.code != 0, outcome.err
    assert outcome.seconds < limit_s, outcome.err
    assert not outcome.left_over, outcome.err


def test_an_exception_before_a_shutdown_is_reported_with_its_rank(tmp_path: Path) -> None:
    body = """
    try:
        now()
        raise ValueError("bad luck")
    finally:
        hvd.shutdown()
    """
    outcome = run_ranks(tmp_path, body)
    assert_ended(outcome)
    assert "[rank 0] ValueError: bad luck" in outcome.err
    assert "excepthook" not in outcome.err


def test_an_exception_in_a_helper_thread_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        def show(step):
            time.sleep(0.1)
            raise ValueError("no terminal")
        bar = threading.Thread(target=show, args=(3,), name="bar")
        if rank == 1:
            bar.start()
        train(steps=3)
        if rank == 1:
            bar.join()
        train(steps=3)
        print("trained")
        sys.exit(5)  # identical on all ranks, so the launcher returns it
        """,
    )
    assert (outcome.code, outcome.out.splitlines()[:2]) == (5, ["trained"] * 2), outcome.err
    for text in (outcome.err, outcome.logs[1]):
        assert "[rank 1] exception in thread bar\n[rank 1] Traceback (most" in text
        assert "[rank 1] ValueError: no terminal" in text


def test_a_rank_that_exits_without_a_message_ends_all(tmp_path: Path) -> None:
    outcome = run_ranks(tmp_path, "if rank == 1:\n    now(); os._exit(0)\ntrain()")
    # MPICH's launcher ends all ranks too, but returns the exit code 0 of the first one.
    assert outcome.code != 0 or not find_mpirun().is_openmpi
    assert outcome.seconds < LIMIT_S
    assert not outcome.left_over
    assert_named(outcome)


def test_a_failure_of_all_ranks_is_reported_once(tmp_path: Path) -> None:
    body = "hvd.barrier(); now()\nraise ValueError('the same everywhere')"
    outcome = run_ranks(tmp_path, body, num_ranks=4)
    assert_ended(outcome)
    assert "[rank 0] ValueError: the same everywhere" in outcome.err
    assert outcome.err.count("Traceback") < 4


def test_a_failure_ends_ranks_that_have_finished(tmp_path: Path) -> None:
    body = "if rank == 1:\n    time.sleep(2); now()\n    raise ValueError('bad luck')"
    outcome = run_ranks(tmp_path, body)
    assert_ended(outcome)
    assert "[rank 1] ValueError: bad luck" in outcome.err


@pytest.mark.parametrize(
    "reached",
    ["mpirun", "a rank that waits", pytest.param("all ranks", marks=pytest.mark.conformance)],
)
def test_ctrl_c_ends_all_ranks_without_a_traceback(reached: str, tmp_path: Path) -> None:
    def interrupt(mpirun) -> None:
        files = {"all ranks": "pid-*", "a rank that waits": "pid-0"}
        pids = [int(file.read_text()) for file in tmp_path.glob(files.get(reached, "none"))]
        for pid in pids or [mpirun.pid]:
            os.kill(pid, signal.SIGINT)

    is_waiting = reached == "a rank that waits"
    body = "if rank == 1:\n    time.sleep(1000)\n" if is_waiting else ""
    outcome = run_ranks(tmp_path, f"{body}train()", disturb=interrupt)
    assert_ended(outcome)
    assert "Traceback" not in outcome.err
    assert reached == "mpirun" or "interrupted" in outcome.err
    assert not is_waiting or (outcome.code == INTERRUPTED and "[rank 0] inter" in outcome.err)


def test_a_rank_that_exceeds_the_timeout_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "2")
    outcome = run_ranks(
        tmp_path,
        """
        now()
        if rank == 1:
            time.sleep(1000)
        handle = hvd.allreduce_async(torch.ones(3), name="early")
        hvd.allreduce(torch.ones(3), name="loss")
        """,
    )
    assert outcome.code == RANK_LOST, outcome.err
    assert re.search(r"rank 0 has waited [2-9] s for the others; see", outcome.err), outcome.err
    assert "submit allreduce.loss within HPCTRAIN_TIMEOUT=2 seconds" in outcome.err
    assert_ended(outcome, 2 + LIMIT_S)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.conformance)])
def test_idle_ranks_use_less_than_one_percent_of_a_core_and_may_finish_early(
    nodes: int, tmp_path: Path
) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        for step in range(20):
            handle = hvd.allreduce_async(torch.ones(10), name="early")
            hvd.allreduce(torch.ones(10), name="late")
            hvd.synchronize(handle)
        used = time.process_time()  # over all threads
        time.sleep(3)
        share = (time.process_time() - used) / 3
        (HERE / f"share-{rank}").write_text(str(share))
        if rank != 0:
            hvd.shutdown()
            hvd.shutdown()
            sys.exit()
        time.sleep(3)  # without calls of hpctrain, as in a long computation
        print("result written")
        """,
        nodes=nodes,
    )
    message = [line for line in outcome.err.splitlines() if "] hpctrain: " not in line]
    assert (outcome.code, outcome.out, message) == (0, "result written\n", [])
    assert not outcome.left_over
    shares = [float(file.read_text()) for file in tmp_path.glob("share-*")]
    assert len(shares) == 2
    assert max(shares) < 0.01


def test_a_world_of_one_keeps_its_hooks() -> None:
    before = sys.excepthook, threading.excepthook
    hpctrain.init()
    assert (sys.excepthook, threading.excepthook) == before
    hpctrain.shutdown()


TENSOR, BUCKET = "torch.ones(1 << 18)", "comm.new_bucket(1 << 18, torch.float32)"


@pytest.mark.requires("own-engine")
@pytest.mark.parametrize(
    ("end", "given"),
    [("sys.exit()", TENSOR), ("os.kill(os.getpid(), signal.SIGKILL)", BUCKET)],
)
def test_a_rank_that_ends_during_a_transfer_between_nodes_ends_all(
    end: str, given: str, tmp_path: Path
) -> None:
    outcome = run_ranks(
        tmp_path,
        f"""
        from dataclasses import replace
        from hpctrain.comm.rail import rail as rails
        from hpctrain.runtime.world import current

        comm = current().comm
        levels = comm._comm if hasattr(comm._comm, "use") else comm  # may be wrapped by a thread
        levels.use(replace(levels.plan, chunk_bytes=4096))
        started, whole = [], rails.InFlight._start

        def start(self, part, tag):
            started.append(tag)
            if (rank, len(started)) == (2, 200):
                now()
                {end}
            whole(self, part, tag)

        rails.InFlight._start = start
        given = {given}
        while True:
            comm.allreduce_(given).wait()
        """,
        num_ranks=3,
        nodes=2,
    )
    assert_ended(outcome)
    if "exit" in end:  # the launcher may end the third rank before it detects the loss
        assert sum("RankLostError" in log for log in outcome.logs.values()) >= 1


def test_a_program_with_an_abandoned_mpi_call_exits_without_mpi_finalize(
    tmp_path: Path,
) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        from mpi4py import MPI
        from hpctrain.comm.waiting import Watch
        from hpctrain.comm.watched_calls import WatchedCalls
        from hpctrain.core.errors import RankLostError
        comm = MPI.COMM_WORLD.Dup()
        if rank == 0:
            try:
                WatchedCalls(comm, Watch(timeout_s=0.2)).block(lambda: comm.Split(0, 0))
            except RankLostError:
                now()
        """,
    )
    assert outcome.code == RANK_LOST, outcome.err
    assert "rank 0 is still inside an MPI call whose wait has failed" in outcome.err
    assert_ended(outcome)
