"""Stall reports of unnamed collectives name the rank that does not take part."""

import pytest

from tests.runtime.victims import run_ranks

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

GRADIENTS = """
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step():
        optimizer.zero_grad()
        model(torch.full((2, 3), rank + 1.0)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
"""


def hang(tmp_path, monkeypatch, body, *, num_ranks):
    """Run until the stall abort, which has exit code 86; return the outcome."""
    monkeypatch.setenv("HPCTRAIN_STALL_S", "1")
    monkeypatch.setenv("HPCTRAIN_STALL_ABORT_S", "12")
    monkeypatch.setenv("HPCTRAIN_LOG_DIR", str(tmp_path / "log"))
    outcome = run_ranks(tmp_path, body, num_ranks=num_ranks)
    assert outcome.code == 86, outcome.err
    assert outcome.left_over == []
    assert "all ranks end now, because of HPCTRAIN_STALL_ABORT_S" in outcome.err
    return outcome


def test_gradients_that_wait_for_a_rank_report_it_and_its_stack(tmp_path, monkeypatch):
    body = f"""{GRADIENTS}
    from mpi4py import MPI

    def a_meeting():
        MPI.COMM_WORLD.Barrier()

    if rank == 1:
        time.sleep(3)
    step()
    if rank == 0:
        print("all is well", flush=True)
    if rank == 1:
        a_meeting()
    step()
    """
    outcome = hang(tmp_path, monkeypatch, body, num_ranks=3)
    assert "all is well" in outcome.out
    assert "of bucket number 1" in outcome.err
    assert "submitted by ranks 0,2, not by rank 1 on " in outcome.err
    assert "in <module>: time.sleep(3)" in outcome.err
    assert "in a_meeting: MPI.COMM_WORLD.Barrier()" in outcome.err
    calls = [(tmp_path / f"log/collectives-{rank}.txt").read_text() for rank in range(3)]
    lasts = [text.splitlines()[-1].partition("ago  ")[2] for text in calls]
    assert lasts[0] == lasts[2] != lasts[1]  # the last collective of each rank, by number
    assert lasts[1] in calls[0]


def test_stalls_in_groups_of_torch_distributed_are_reported(tmp_path, monkeypatch):
    body = """
    import os, signal
    import torch.distributed as dist

    dist.init_process_group("hpctrain")
    pair = dist.new_group([1, 2])
    dist.all_reduce(torch.ones(5))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        dist.all_reduce(torch.ones(7), group=pair)
    dist.all_reduce(torch.ones(5))
    """
    outcome = hang(tmp_path, monkeypatch, body, num_ranks=3)
    assert "of ranks 1-2: sum of 7 float32" in outcome.err
    assert "submitted by rank 1, not by rank 2 on " in outcome.err, outcome.err
    assert "no answer; stopped, or in code that holds the GIL" in outcome.err
