"""A run continues after the loss of a node."""

import time

import pytest

from tests.cluster.slurm.job import ENDS
from tests.slurm.watching import Run

pytestmark = [
    pytest.mark.launches,
    pytest.mark.requires("slurm"),
    pytest.mark.limit(900),
    pytest.mark.conformance,
]

AGAIN_S = 60.0  # limit from the power cut to the next start; Slurm needs 28 s to detect the loss


@pytest.mark.parametrize("which", [0, 1], ids=["node-of-the-script", "other-node"])
def test_after_a_power_cut_the_run_continues_on_other_nodes(slurm, tmp_path, which):
    whole = Run(slurm, tmp_path / "whole", step_s=0.01)
    reference = whole.submit("multi_node")
    assert reference.wait() == "COMPLETED", reference.output()
    run = Run(slurm, tmp_path / "run", step_s=0.3)
    job = run.submit("requeue")
    run.wait_for_step(9)
    lost = job.nodes()[which]
    slurm.kill_node(lost)
    cut = time.monotonic()
    while not job.restarts() or job.state() != "RUNNING":
        assert job.state() not in ENDS, job.output()
        assert time.monotonic() < cut + AGAIN_S, (job.state(), job.output())
        time.sleep(0.1)
    assert lost not in job.nodes()
    assert job.wait(300) == "COMPLETED", job.output()
    assert run.curve() == whole.curve()
    second = run.parts()[1]
    assert (second["part"], second["restarts"], second["ended_by"]) == (2, 1, "killed")
