"""Horovod scripts on several ranks under the shim."""

import os
import subprocess
import sys

import pytest

from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended

SCRIPT = """
import sys
import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import mpi_built
from horovod.torch.elastic import TorchState, run
from horovod.torch.mpi_ops import allreduce_async_, synchronize

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
state = TorchState(model, optimizer, step=0)
failures = []

@run
def train(state):
    while state.step < 3:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if state.step == 1 and not failures:
            failures.append(state.step)
            raise HorovodInternalError("once")
        state.step += 1
        state.commit()

train(state)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
least = hvd.allreduce(weights, op=hvd.Min, name="least")
most = hvd.allreduce(weights, op=hvd.Max, name="most")
ranks = synchronize(allreduce_async_(torch.ones(1), op=hvd.Sum, name="ranks"))
if hvd.rank() == 0:
    out = torch.equal(least, most), int(ranks), failures, mpi_built(), sys.argv[1:]
    print(*out, flush=True)
"""


def launched(num_ranks, script, *arguments, **variables):
    line = [*preload.python(), "-m", "hpctrain", "shim", str(script), *arguments]
    return ended(
        mpiexec.command(line, num_ranks=num_ranks),
        env=mpiexec.environment({**os.environ, "HPCTRAIN_PROBE": "off", **variables}),
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.launches
@pytest.mark.limit(120)
def test_a_horovod_script_trains_unchanged_and_a_failing_rank_ends_all(tmp_path):
    end = "if hvd.rank() == 1:\n    hvd.nonsense\nhvd.barrier()\n"
    (tmp_path / "train.py").write_text(SCRIPT + end)
    done = launched(2, tmp_path / "train.py", "--epochs", "3")
    assert done.stdout == "True 2 [1] True ['--epochs', '3']\n", done.stderr
    assert "not a setting" not in done.stderr
    assert done.returncode == 1
    assert "[rank 1] AttributeError: hpctrain has no counterpart of 'nonsense'" in done.stderr


@pytest.mark.conformance
@pytest.mark.launches
@pytest.mark.limit(120)
@pytest.mark.requires("horovod")
def test_a_horovod_script_runs_on_an_installed_horovod(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT + "print(horovod.__version__)\n")
    done = launched(2, tmp_path / "train.py", HPCTRAIN_ENGINE="horovod")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0.28.1+hpctrain"] * 2 + ["True 2 [1] True []"]


RUN = """
import horovod
import horovod.torch as hvd
OFFSET = 3
def work(factor, plus=0):
    hvd.init()
    return hvd.rank() * factor + plus + OFFSET, hvd.size(), horovod.__version__
if __name__ == "__main__":
    print(horovod.run(work, args=(10,), kwargs={"plus": 2}, np=1, use_mpi=True))
"""


@pytest.mark.launches
@pytest.mark.limit(120)
def test_horovod_run_starts_a_function_on_new_ranks(tmp_path):
    (tmp_path / "notebook.py").write_text(RUN)
    done = ended([sys.executable, "-m", "hpctrain", "shim", str(tmp_path / "notebook.py")])
    assert done.stdout == "[(5, 1, '0.28.1+hpctrain')]\n", done.stderr
