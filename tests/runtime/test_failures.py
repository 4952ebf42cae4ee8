"""One rank fails: all ranks end within five seconds, with a non-zero code, and it is said why."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hpctrain
from hpctrain.launch.mpirun import find_mpirun
from tests.runtime.victims import Outcome, run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

LIMIT_S = 5.0

RAISES = {
    "in_the_loop": """
        if rank == 1:
            now()
            raise ValueError("bad luck")
        train()
    """,
    "in_an_autograd_hook": """
        weight = torch.nn.Parameter(torch.ones(3))
        def hook(parameter):
            now()
            raise ValueError("bad luck")
        if rank == 1:
            weight.register_post_accumulate_grad_hook(hook)
        train(steps=5)
        weight.sum().backward()
        train()
    """,
    "in_a_thread_that_communicates": """
        def work():
            hvd.barrier(**alone)
            now()
            raise ValueError("bad luck")
        alone = {"process_set": hvd.add_process_set([1])}
        if rank == 1:
            threading.Thread(target=work).start()
        train()
    """,
    "in_a_thread_that_computes": """
        def work(model):
            now()
            raise ValueError("bad luck")
        if rank == 1:
            threading.Thread(target=work, args=(torch.nn.Linear(1, 1),)).start()
        train()
    """,
    "in_a_loader_thread": """
        from concurrent.futures import ThreadPoolExecutor
        def read(index):
            if rank == 1 and index == 3:
                now()
                raise ValueError("bad luck")
            return torch.ones(4)
        with ThreadPoolExecutor(1) as pool:
            for batch in pool.map(read, range(10**4)):
                train(steps=1)
    """,
}


def test_an_exception_in_a_thread_that_only_helps_is_told_and_ends_nobody(tmp_path: Path) -> None:
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
        """,
    )
    assert (outcome.code, outcome.out) == (0, "trained\ntrained\n"), outcome.err
    for text in (outcome.err, outcome.logs[1]):
        assert "[rank 1] exception in thread bar\n[rank 1] Traceback (most" in text
        assert "[rank 1] ValueError: no terminal" in text


def assert_ended(outcome: Outcome, limit_s: float = LIMIT_S) -> None:
    assert outcome.code != 0, outcome.err
    assert outcome.seconds < limit_s, outcome.err
    assert not outcome.left_over, outcome.err


@pytest.mark.parametrize("place", RAISES)
def test_an_exception_on_one_rank_ends_all_with_its_traceback(place: str, tmp_path: Path) -> None:
    outcome = run_ranks(tmp_path, RAISES[place])
    assert_ended(outcome)
    for text in (outcome.err, outcome.logs[1]):
        assert "[rank 1] Traceback (most recent call last):" in text
        assert "[rank 1] ValueError: bad luck" in text
    assert outcome.err.count("Traceback") == 1, outcome.err


@pytest.mark.parametrize(("code", "nodes"), [(0, 1), (0, 2), (3, 1)])
def test_a_rank_that_exits_while_others_wait_for_it_ends_all(
    code: int, nodes: int, tmp_path: Path
) -> None:
    outcome = run_ranks(
        tmp_path,
        f"""
        if rank == 1:
            now()
            sys.exit({code})
        train()
        """,
        # On two nodes one rank waits beside the lost one, and one on the other node.
        num_ranks=1 + nodes,
        nodes=nodes,
    )
    assert_ended(outcome)
    assert "rank 1 left the program" in outcome.err
    assert "Traceback" not in outcome.err
    assert any("RankLostError" in log for log in outcome.logs.values())


def test_a_crash_in_native_code_ends_all_with_the_tagged_stack(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        import ctypes
        def crash():
            now()
            ctypes.string_at(0)
        if rank == 1:
            crash()
        train()
        """,
    )
    assert_ended(outcome)
    for text in (outcome.err, outcome.logs[1]):
        assert "[rank 1] Fatal Python error: Segmentation fault" in text
        assert "in crash" in text


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        if rank == 1:
            now()
            os.kill(os.getpid(), signal.SIGKILL)
        train()
        """,
    )
    assert_ended(outcome)
    assert "Traceback" not in outcome.err


def test_a_rank_that_vanishes_without_a_trace_ends_all(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        if rank == 1:
            now()
            os._exit(0)
        train()
        """,
    )
    # MPICH's launcher ends all ranks at once as well, but returns the 0 of the first one.
    assert outcome.code != 0 or not find_mpirun().is_openmpi
    assert outcome.seconds < LIMIT_S
    assert not outcome.left_over


def test_a_failure_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        hvd.barrier()
        now()
        raise ValueError("the same everywhere")
        """,
        num_ranks=4,
    )
    assert_ended(outcome)
    assert "[rank 0] ValueError: the same everywhere" in outcome.err
    assert outcome.err.count("Traceback") < 4


def test_a_failure_ends_ranks_that_are_done(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        if rank == 1:
            time.sleep(2)
            now()
            raise ValueError("bad luck")
        """,
    )
    assert_ended(outcome)
    assert "[rank 1] ValueError: bad luck" in outcome.err


def test_ctrl_c_is_clean(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path, "train()", disturb=lambda mpirun: mpirun.send_signal(signal.SIGINT)
    )
    assert_ended(outcome)
    assert "Traceback" not in outcome.err


def test_ctrl_c_that_reaches_every_rank_is_clean(tmp_path: Path) -> None:
    def interrupt(_mpirun: subprocess.Popen[str]) -> None:
        for file in tmp_path.glob("pid-*"):
            os.kill(int(file.read_text()), signal.SIGINT)

    outcome = run_ranks(tmp_path, "train()", disturb=interrupt)
    assert_ended(outcome)
    assert "Traceback" not in outcome.err
    assert "interrupted" in outcome.err


def test_a_rank_may_be_done_long_before_the_others_and_nothing_is_said(tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        train(steps=3)
        if rank != 0:
            sys.exit()
        time.sleep(4)  # without a call of ours, as in a long computation
        print("result written")
        """,
    )
    assert (outcome.code, outcome.out, said(outcome)) == (0, "result written\n", [])
    assert not outcome.left_over


def test_a_rank_that_idles_uses_under_one_percent_of_a_core_and_may_take_leave_twice(
    tmp_path: Path,
) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        train(steps=3, pause_s=0)
        used = time.process_time()  # of all threads
        time.sleep(3)
        share = (time.process_time() - used) / 3
        (HERE / f"share-{rank}").write_text(str(share))
        hvd.shutdown()
        hvd.shutdown()
        """,
    )
    assert (outcome.code, outcome.out, said(outcome)) == (0, "", [])
    assert not outcome.left_over
    shares = [float(file.read_text()) for file in tmp_path.glob("share-*")]
    assert len(shares) == 2
    assert max(shares) < 0.01


def test_a_failing_exit_code_of_all_ranks_is_kept(tmp_path: Path) -> None:
    outcome = run_ranks(tmp_path, "train(steps=3)\nsys.exit(5)")
    assert outcome.code == 5
    assert "[rank" not in "".join(said(outcome))


def test_a_world_of_one_keeps_its_hooks() -> None:
    before = sys.excepthook, threading.excepthook
    hpctrain.init()
    assert (sys.excepthook, threading.excepthook) == before
    hpctrain.shutdown()


def said(outcome: Outcome) -> list[str]:
    """Return what is on stderr beside the logger's words: a small machine gets warnings."""
    return [line for line in outcome.err.splitlines() if "] hpctrain: " not in line]
