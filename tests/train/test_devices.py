"""Where a run is calculated: on the CPU, or on an accelerator of each rank."""

import os
import sys

import pytest
import torch

from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.launch import mpiexec
from hpctrain.train.config import TrainingConfig
from hpctrain.train.task import build
from tests.processes import ended
from tests.train import device_run
from tests.train.starting import ROOT

CASES = ("whole", *device_run.CASES)


@pytest.mark.ranks(1, 2)
def test_a_device_that_a_rank_lacks_is_an_error_of_all_ranks(here, configure):
    kind = "hpu" if here.comm.rank == here.comm.size - 1 else "cpu"
    with pytest.raises(MismatchError, match=r"train\.device is auto, cpu.* here, got 'hpu'"):
        build(configure(f"train.device={kind}"), here.comm)


@pytest.mark.parametrize("how", [{"reproducible": True}, {"shard": "node"}])
def test_what_needs_the_cpu_takes_no_other_device(how):
    TrainingConfig(device="cpu", **how)
    TrainingConfig(device="auto", **how)
    with pytest.raises(ConfigError, match="device is cpu for train"):
        TrainingConfig(device="cuda", **how)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_nothing_is_said(here, configure):
    task = build(configure(), here.comm)
    assert (task.device, task.device_reason) == (torch.device("cpu"), "")
    assert not task.train.pin_memory


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.requires("mcpu")
@pytest.mark.limit(600)
@pytest.mark.parametrize("case", CASES)
def test_on_an_accelerator_runs_learn_the_same_and_go_on(tmp_path, case):
    line = [sys.executable, device_run.__file__, str(tmp_path), case]
    path = os.pathsep.join((str(ROOT), os.environ["MCPU_SITE"]))
    own = {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    line = mpiexec.command(line, num_ranks=2)
    done = ended(line, timeout=500, env=mpiexec.environment() | own, cwd=ROOT)
    assert f"{case} holds" in done.stdout, done.stdout + done.stderr
