"""The device of a run: the CPU, or an accelerator of each rank."""

import pytest
import torch

from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.train.run_config import RunConfig, TrainingConfig
from hpctrain.train.task import build


@pytest.mark.ranks(1, 2)
def test_a_device_missing_on_one_rank_is_an_error_on_all(here, configure):
    kind = "hpu" if here.comm.rank == here.comm.size - 1 else "cpu"
    with pytest.raises(
        MismatchError, match=r"train\.device must be auto, cpu.* on this rank, got 'hpu'"
    ):
        build(configure(f"train.device={kind}"), here.comm)


@pytest.mark.parametrize("how", [{"reproducible": True}, {"shard": "node"}])
def test_options_for_cpus_reject_other_devices(how):
    for device in ("cpu", "auto"):
        RunConfig(train=TrainingConfig(device=device, **how))
    with pytest.raises(ConfigError, match="device must be auto or cpu with train"):
        RunConfig(train=TrainingConfig(device="cuda", **how))


@pytest.mark.requires("no-accelerator")
def test_without_an_accelerator_no_reason_is_reported(here, configure):
    task = build(configure(), here.comm)
    assert (task.device, task.device_reason) == (torch.device("cpu"), "")
    assert not task.train.pin_memory
