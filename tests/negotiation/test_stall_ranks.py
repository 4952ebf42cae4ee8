"""Stall reports of real ranks that wait for a rank, the abort, and their timelines."""

import pytest

from tests.negotiation.test_timeline_ranks import open_slices
from tests.runtime.victims import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]


def test_a_late_rank_is_reported_and_a_hang_ends_with_code_86(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_STALL_S", "1")
    monkeypatch.setenv("HPCTRAIN_STALL_ABORT_S", "6")
    monkeypatch.setenv("HPCTRAIN_TIMELINE", str(tmp_path / "{rank}.json"))
    body = """
        import ctypes

        def a_holiday():
            time.sleep(3)

        def a_long_holiday():
            time.sleep(1000)

        for _ in range(5):  # cached: later calls send no control messages
            hvd.allreduce(torch.ones(3), name="loss")
        hvd.allreduce(torch.ones(3), name="first")
        if rank == 1:
            a_holiday()
        hvd.allreduce(torch.ones(3), name="loss")
        if rank == 0:
            print("all is well", flush=True)
        if rank == 1:
            a_long_holiday()
        if rank == 2:
            ctypes.PyDLL(None).sleep(1000)  # holds the GIL
        hvd.allreduce(torch.ones(3), name="more")
    """
    outcome = run_ranks(tmp_path, body, num_ranks=3)
    assert outcome.code == 86, outcome.err
    assert outcome.left_over == []
    assert "all is well" in outcome.out
    assert '"allreduce.loss" has waited' in outcome.err
    assert "submitted by ranks 0,2, not by rank 1 on " in outcome.err
    assert "last collective: allreduce" in outcome.err
    assert "in a_holiday: time.sleep(3)" in outcome.err
    assert "submitted by rank 0, not by ranks 1-2 on " in outcome.err
    assert "in a_long_holiday: time.sleep(1000)" in outcome.err
    assert "rank 2 on " in outcome.err
    assert "no answer" in outcome.err
    # the operation that rank 0 waited for
    assert open_slices(tmp_path / "0.json")["allreduce.more"] == 1
