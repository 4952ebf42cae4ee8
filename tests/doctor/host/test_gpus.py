import pytest

from hpctrain.doctor.host.gpus import check, num_of_job
from tests.doctor.host.healthy import BATCH, HEALTHY, SRUN, only, with_


def test_a_device_that_is_named_twice_is_an_error():
    found = only(check(with_({"CUDA_VISIBLE_DEVICES": "0, 1,0"}, num_gpus=2)))
    assert found.level == "error"
    assert found.do == "export CUDA_VISIBLE_DEVICES=0,1"


@pytest.mark.parametrize(
    ("gpus", "level"),
    [
        ({"SLURM_GPUS_ON_NODE": "2"}, "warning"),
        ({"SLURM_JOB_GPUS": "0,1,2"}, "warning"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "warning"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "ok"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "note"),
        ({}, "ok"),
    ],
)
def test_more_tasks_than_devices_are_a_warning_before_the_launch(gpus, level):
    assert only(check(with_({**BATCH, **gpus}))).level == level


def test_ranks_that_run_compare_their_devices_themselves():
    assert only(check(with_({**SRUN, "SLURM_GPUS_ON_NODE": "1"}))).level == "ok"


def test_a_torch_without_cuda_on_a_machine_with_gpus_is_a_warning():
    found = only(check(with_(versions={"torch": "2.13.0+cpu"}, num_gpus=4)))
    assert found.level == "warning"
    assert only(check(with_(versions={"torch": "2.13.0+cpu"}))).level == "ok"
    assert only(check(with_(versions={"torch": "2.13.0+cu130"}, num_gpus=4))).level == "ok"


@pytest.mark.parametrize("text", ["", "-1"])
def test_hidden_devices_are_a_note(text):
    assert only(check(with_({"CUDA_VISIBLE_DEVICES": text}, num_gpus=4))).level == "note"
    assert only(check(with_({"CUDA_VISIBLE_DEVICES": text}))).level == "ok"


def test_the_job_says_how_many_devices_it_has():
    assert num_of_job({}) is None
    assert num_of_job({"SLURM_STEP_GPUS": "2,5"}) == 2
    assert only(check(HEALTHY)).what == "0 in this machine"
