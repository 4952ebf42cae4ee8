import pytest

from hpctrain.doctor.host.job import check, check_launcher, ranks_per_node
from tests.doctor.host.healthy import BATCH, HEALTHY, MPICH, SRUN, only, with_

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "6"}


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        (SRUN, 4),
        (BATCH, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "2"}, 1),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "9"}, 3),
        ({"SLURM_TASKS_PER_NODE": "nonsense"}, None),
    ],
)
def test_ranks_of_a_node_are_read_from_launcher_and_scheduler(environ, count):
    assert ranks_per_node(environ) == count


def test_a_job_is_told_with_its_division():
    assert only(check(with_(BATCH))).what == "slurm job 7, 2 nodes node[1-2], 4 tasks on this node"
    assert only(check(HEALTHY)).what.startswith("no job")


def test_cores_that_srun_would_not_pass_on_are_a_note():
    found = check(with_({**BATCH, "SLURM_CPUS_PER_TASK": "4"}))[-1]
    assert found.level == "note"
    assert "SRUN_CPUS_PER_TASK" in found.do


@pytest.mark.parametrize(
    "environ",
    [
        {**BATCH, "SLURM_CPUS_PER_TASK": "1"},
        {**BATCH, "SLURM_CPUS_PER_TASK": "4", "SRUN_CPUS_PER_TASK": "4"},
        {**SRUN, "SLURM_CPUS_PER_TASK": "4"},
    ],
)
def test_cores_that_are_passed_on_are_not(environ):
    assert only(check(with_(environ))).level == "ok"


def test_a_rank_tells_its_launcher():
    assert only(check_launcher(with_(SRUN))).what == "srun: rank 0 of 8 (SLURM_STEP_NUM_TASKS)"
    assert "alone" in only(check_launcher(HEALTHY)).what


@pytest.mark.parametrize(
    ("offered", "library", "level"),
    [
        (("none", "pmi2", "pmix_v4"), None, "ok"),
        (("none", "pmi2", "cray_shasta"), None, "warning"),
        (("none", "pmi2"), MPICH, "ok"),
        (("none", "pmix"), MPICH, "warning"),
    ],
)
def test_a_slurm_without_what_the_library_needs_is_a_warning(offered, library, level):
    mpi = {"srun_types": offered} | ({"library": library} if library else {})
    found = only(check_launcher(with_(BATCH, mpi=mpi)))
    assert found.level == level
    assert (level == "ok") or "hpctrain launch" in found.do
