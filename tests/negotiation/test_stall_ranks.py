"""Real ranks wait for one that does something else: told of, ended where that is asked."""

import pytest

from tests.runtime.victims import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]


def test_a_rank_that_comes_late_is_reported_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_STALL_S", "1")
    body = """
        def a_long_holiday():
            time.sleep(4)

        hvd.allreduce(torch.ones(3), name="first")
        if rank == 1:
            a_long_holiday()
        hvd.allreduce(torch.ones(3), name="loss")
        if rank == 0:
            print("all is well")
    """
    outcome = run_ranks(tmp_path, body)
    assert outcome.code == 0, outcome.err
    assert "all is well" in outcome.out
    assert '"allreduce.loss" has waited' in outcome.err
    assert "submitted by rank 0, not by rank 1 on " in outcome.err
    assert "last collective: allreduce" in outcome.err
    assert "in a_long_holiday: time.sleep(4)" in outcome.err


def test_a_run_that_hangs_is_ended_with_code_86(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_STALL_ABORT_S", "1.5")
    body = """
        import ctypes

        def a_long_holiday():
            time.sleep(1000)

        if rank == 1:
            a_long_holiday()
        if rank == 2:
            ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock
        hvd.allreduce(torch.ones(3), name="loss")
    """
    outcome = run_ranks(tmp_path, body, num_ranks=3)
    assert outcome.code == 86, outcome.err
    assert outcome.left_over == []
    assert "submitted by rank 0, not by ranks 1-2 on " in outcome.err
    assert "in a_long_holiday: time.sleep(1000)" in outcome.err
    assert "rank 2 on " in outcome.err
    assert "no answer" in outcome.err
    assert "all ranks end now, as HPCTRAIN_STALL_ABORT_S asks" in outcome.err
