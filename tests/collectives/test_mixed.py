"""Check all named operations together: any order, thread and time, cached or new."""

import os

import pytest

from tests.collectives.mixed import Steps, num_commits
from tests.runtime.victims import run_ranks

NUM_STEPS = int(os.environ.get("TEST_MIXED_STEPS", "500"))


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.limit(60 + NUM_STEPS / 5)
def test_operations_of_all_kinds_in_any_order_give_their_results(hvd):
    some = hvd.add_process_set(range(hvd.size() - 1)) if hvd.size() > 2 else None
    Steps(NUM_STEPS, some).take(NUM_STEPS)
    last = hvd.join()
    assert 0 <= last < hvd.size()
    assert num_commits() > NUM_STEPS / 10  # many need no control message
    if some is not None:
        hvd.remove_process_set(some)


@pytest.mark.launches
@pytest.mark.limit(150)
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.conformance), 3])
def test_six_ranks_with_two_levels_of_control_messages(tmp_path, nodes):
    body = """
    from tests.collectives.mixed import Steps, num_commits
    Steps(6).take(60)
    print("commits", num_commits(), flush=True)
    """
    outcome = run_ranks(tmp_path, body, num_ranks=6, nodes=nodes)
    assert outcome.code == 0, outcome.err
    counts = [int(line.split()[1]) for line in outcome.out.splitlines() if "commits" in line]
    assert len(counts) == 6
    assert min(counts) == max(counts) > 6


@pytest.mark.launches
@pytest.mark.limit(150)
@pytest.mark.parametrize(("victim", "nodes"), [(0, 1), (1, 1), (1, 2), (2, 2)])
def test_dead_rank_is_reported_by_waiting_ranks(tmp_path, victim, nodes):
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun has heard of it too
    value = torch.ones(2)
    def work():
        hvd.allreduce_(value, name="again", op=hvd.Max)
    for step in range(20):
        work()
    if rank == {victim}:
        time.sleep(0.5)
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        work()
    except hvd.RankLostError as error:
        (HERE / f"error-{{rank}}").write_text(f"{{time.time()}} {{error}}")
    time.sleep(1)
    os._exit(1)
    """
    outcome = run_ranks(tmp_path, body, num_ranks=3, nodes=nodes)
    assert outcome.code != 0
    failed_at = float((tmp_path / "failed_at").read_text())
    for rank in {0, 1, 2} - {victim}:
        when, error = (tmp_path / f"error-{rank}").read_text().split(" ", 1)
        assert f"rank {victim} (process" in error
        assert "died while" in error
        assert float(when) - failed_at < 5.0
