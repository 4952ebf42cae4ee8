"""Named operations wait for a rank that is dead, silent or interrupted; or nobody waits."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hpctrain.launch.mpirun import find_mpirun
from hpctrain.runtime.abort import INTERRUPTED, RANK_LOST
from tests.runtime.victims import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

LIMIT_S = 5.0


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_killed_rank_ends_those_that_wait_for_it(nodes: int, tmp_path: Path) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun is fast
        if rank == 1:
            time.sleep(0.5)
            now()
            os.kill(os.getpid(), signal.SIGKILL)
        handle = hvd.allreduce_async(torch.ones(3), name="early")
        hvd.allreduce(torch.ones(3), name="loss")
        """,
        num_ranks=1 + nodes,
        nodes=nodes,
    )
    # The launcher may be the first to see that a process was killed.
    assert outcome.code in (RANK_LOST, 128 + signal.SIGKILL) or not find_mpirun().is_openmpi
    assert outcome.code != 0
    assert outcome.seconds < LIMIT_S
    assert not outcome.left_over
    assert "Traceback" not in outcome.err


def test_a_rank_that_is_silent_for_too_long_ends_all(
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
    assert "rank 0 has waited 2 s for the others to submit allreduce.loss" in outcome.err
    assert "HPCTRAIN_TIMEOUT=2" in outcome.err
    assert outcome.seconds < 2 + LIMIT_S
    assert not outcome.left_over


def test_ctrl_c_on_a_rank_that_waits_ends_all(tmp_path: Path) -> None:
    def interrupt(_mpirun: subprocess.Popen[str]) -> None:
        os.kill(int((tmp_path / "pid-0").read_text()), signal.SIGINT)

    outcome = run_ranks(
        tmp_path,
        """
        if rank == 1:
            time.sleep(1000)
        hvd.allreduce(torch.ones(3), name="loss")
        """,
        disturb=interrupt,
    )
    assert outcome.code == INTERRUPTED, outcome.err
    assert outcome.seconds < LIMIT_S
    assert not outcome.left_over
    assert "[rank 0] interrupted" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_idle_after_named_operations_use_under_one_percent_of_a_core(
    nodes: int, tmp_path: Path
) -> None:
    outcome = run_ranks(
        tmp_path,
        """
        for step in range(20):
            handle = hvd.allreduce_async(torch.ones(10), name="early")
            hvd.allreduce(torch.ones(10), name="late")
            hvd.synchronize(handle)
        used = time.process_time()  # of all threads
        time.sleep(3)
        share = (time.process_time() - used) / 3
        (HERE / f"share-{rank}").write_text(str(share))
        hvd.barrier()
        """,
        nodes=nodes,
    )
    assert outcome.code == 0, outcome.err
    shares = [float(file.read_text()) for file in tmp_path.glob("share-*")]
    assert len(shares) == 2
    assert max(shares) < 0.01
