"""``hpctrain.submit`` on a running Slurm: a function as a job, its results and errors."""

import subprocess
import sys
from dataclasses import replace

import pytest

import hpctrain
from hpctrain import ConfigError, RankError, Resources

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(300)]


# "nodes" is an argument of the function and also the name of a resource
def total(first, *, nodes):
    hvd = hpctrain
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}\n")
    ranks = hvd.allgather_object(hvd.rank())
    return first + nodes + sum(ranks), hvd.rank(), hvd.current().topology.num_nodes


def fails():
    raise KeyError("no such column")


@pytest.mark.usefixtures("login")
def test_a_submitted_function_returns_results_raises_errors_and_can_be_cancelled():
    small = Resources(tasks=1, time="10min")
    good = hpctrain.submit(total, replace(small, nodes=2), 1, nodes=10)
    bad = hpctrain.submit(fails, small)
    held = hpctrain.submit(total, replace(small, options=["--hold"]), 1, nodes=2)
    assert held.state == "PENDING"
    assert not held.done()
    with pytest.raises(TimeoutError, match=r"must end within 0 s, but is PENDING"):
        held.result(timeout_s=0)
    held.cancel()
    assert good.results(timeout_s=200) == [(12, 0, 2), (12, 1, 2)]
    assert good.result() == (12, 0, 2)
    assert {"rank 0 of 2", "rank 1 of 2"} <= {*good.stdout().splitlines()}
    assert good.state == "COMPLETED"
    with pytest.raises(RankError, match="no such column") as raised:
        bad.result(timeout_s=200)
    assert isinstance(raised.value.__cause__, KeyError)
    assert "in fails" in raised.value.remote_traceback
    assert (bad.state, held.state) == ("FAILED", "CANCELLED")
    with pytest.raises(hpctrain.LaunchError, match="CANCELLED with 0 of 1 results"):
        held.result()


def test_resources_are_checked_and_must_be_the_second_argument():
    with pytest.raises(ConfigError, match="nodes must be at least 1, got 0"):
        Resources(nodes=0)
    with pytest.raises(ConfigError, match=r"the resources of the job, got 1; use hpctrain.submit"):
        hpctrain.submit(total, 1)


@pytest.mark.parametrize("folder", ["/proc/none/here", "/dev/null/here"])
def test_a_folder_that_cannot_be_written_is_rejected(folder):
    with pytest.raises(ConfigError, match=rf"folder of a job must be writable, but {folder}"):
        hpctrain.submit(total, Resources(folder=folder), 1, nodes=2)


def test_a_login_node_needs_neither_torch_nor_mpi():
    code = (
        "import sys; from hpctrain import submit, Job; "
        "assert not {'torch', 'mpi4py'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
