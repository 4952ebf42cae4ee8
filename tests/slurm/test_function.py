"""``hpctrain.submit`` on a running Slurm: a function as a job, its results and its failures."""

import subprocess
import sys

import pytest

import hpctrain
from hpctrain import RankError

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(300)]


def total(first, *, second):
    hvd = hpctrain
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}\n")
    ranks = hvd.allgather_object(hvd.rank())
    return first + second + sum(ranks), hvd.rank(), hvd.current().topology.num_nodes


def fails():
    raise KeyError("no such column")


@pytest.mark.usefixtures("login")
def test_a_function_returns_by_rank_raises_with_its_traceback_and_is_cancelled():
    small = {"tasks": 1, "time": "10min"}
    good = hpctrain.submit(total, 1, second=10, nodes=2, **small)
    bad = hpctrain.submit(fails, **small)
    held = hpctrain.submit(total, 1, second=2, options=("--hold",), **small)
    assert held.state == "PENDING"
    assert not held.done()
    with pytest.raises(TimeoutError, match=r"is PENDING after 0 s"):
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


def test_a_login_node_needs_neither_torch_nor_mpi():
    code = (
        "import sys; from hpctrain import submit, Job; "
        "assert not {'torch', 'mpi4py'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
