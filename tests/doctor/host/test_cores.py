import pytest

from hpctrain.doctor.host.cores import check, check_threads, cores_each, num_given
from tests.doctor.host.healthy import HEALTHY, SRUN, only, with_


@pytest.mark.parametrize(
    ("environ", "mask", "level"),
    [
        ({}, (5,), "warning"),
        (SRUN, (5,), "warning"),
        (SRUN, (4, 5), "ok"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, (5,), "ok"),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1"}, (5,), "ok"),
        ({**SRUN, "SLURM_CPUS_PER_TASK": "2"}, (4,), "warning"),
        ({**SRUN, "SLURM_CPUS_PER_TASK": "2"}, (4, 5), "ok"),
    ],
)
def test_a_mask_that_leaves_cores_idle_is_a_warning(environ, mask, level):
    found = only(check(with_(environ, cores={"mask": mask})))
    assert found.level == level


def test_a_mask_smaller_than_the_job_asked_for_is_a_warning():
    environ = {**SRUN, "SLURM_CPUS_PER_TASK": "4"}
    found = only(check(with_(environ, cores={"mask": (0, 1), "num_online": 64})))
    assert found.level == "warning"
    assert "srun --cpus-per-task" in found.do


def test_a_machine_of_one_core_has_no_fault():
    assert only(check(with_(cores={"mask": (0,), "num_online": 1}))).level == "ok"


def test_a_quota_counts_as_cores():
    facts = with_(cores={"quota": 2.5})
    assert num_given(facts) == 2
    assert "time for 2.5 of them" in only(check(facts)).what


@pytest.mark.parametrize(
    ("environ", "mask", "each"),
    [
        ({}, range(8), 8),
        (SRUN, range(8), 2),  # all four ranks have this mask
        (SRUN, (4, 5), 2),
        (SRUN, (4,), 1),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "16(x2)"}, range(8), 1),
    ],
)
def test_ranks_divide_a_mask_that_they_share(environ, mask, each):
    assert cores_each(with_(environ, cores={"mask": tuple(mask)})) == each


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, "ok"),
        ({"OMP_NUM_THREADS": "2"}, "ok"),
        ({"OMP_NUM_THREADS": "8"}, "warning"),
        ({"OMP_NUM_THREADS": "8,2"}, "warning"),
        ({"MKL_NUM_THREADS": "3"}, "warning"),
        ({"OMP_NUM_THREADS": "1"}, "note"),
        ({"OMP_NUM_THREADS": "auto"}, "ok"),
    ],
)
def test_more_threads_than_cores_are_a_warning(variables, level):
    found = only(check_threads(with_({**SRUN, **variables})))
    assert found.level == level
    assert level == "ok" or found.do.endswith("=2, or unset it: hpctrain then takes what fits")


def test_each_variable_is_a_finding():
    environ = {"OMP_NUM_THREADS": "16", "OPENBLAS_NUM_THREADS": "16"}
    assert [each.level for each in check_threads(with_(environ))] == ["warning"] * 2
    assert only(check_threads(HEALTHY)).what == "8 for each rank"
