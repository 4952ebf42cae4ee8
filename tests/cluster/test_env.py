"""Check environments as launchers set them, reduced to the relevant variables."""

from pathlib import Path

import pytest

from hpctrain.cluster.env import (
    job_id,
    launched,
    scheduler,
    scratch_folders,
    tuning,
    unstarted,
)

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "LSB_JOBID": "77",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PBS_JOBID": "77.host",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host",
}
TORCHRUN = TORCH | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = TORCH | {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "name", "pmi"),
    [
        (TORCHRUN, "torchrun", ""),
        (SRUN | TORCHRUN, "torchrun", ""),
        (DEEPSPEED, "deepspeed", ""),
        (SRUN | DEEPSPEED, "deepspeed", ""),
        (TORCH, "a launcher of torch.distributed", ""),
        (SRUN | TORCH | {"WORLD_SIZE": "8"}, "srun", ""),
        (OPENMPI | TORCH | {"WORLD_SIZE": "8"}, "Open MPI mpirun", ""),
        (OPENMPI, "Open MPI mpirun", ""),
        (HYDRA, "MPICH mpirun", ""),
        (JSRUN, "jsrun", ""),
        (FLUX, "flux", ""),
        (PALS, "PALS mpiexec", ""),
        (SRUN | {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "3"}, "srun", "pmix"),
        (SRUN | {"SLURM_MPI_TYPE": "pmi2", "PMI_RANK": "3", "PMI_SIZE": "4"}, "srun", "pmi2"),
        (SRUN | {"SLURM_MPI_TYPE": "cray_shasta", "PMI_JOBID": "77.0"}, "srun", "cray_shasta"),
        (SRUN | {"SLURM_MPI_TYPE": "none"}, "srun", "none"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"}, "a PMI launcher", ""),
    ],
)
def test_every_launcher_is_read_as_rank_3_of_4(environ, name, pmi):
    found = launched(environ)
    assert found is not None
    assert (found.name, found.rank, found.size, found.local_rank) == (name, 3, 4, 1)
    assert found.pmi == pmi
    assert environ[found.size_variable] == "4"
    assert found.by_mpi == ("torch" not in name and name != "deepspeed")


@pytest.mark.parametrize("mpirun", [OPENMPI, HYDRA])
@pytest.mark.parametrize("slurm", [SLURM_BATCH, SRUN | {"SLURM_PROCID": "0"}])
def test_variables_of_mpirun_take_precedence_over_slurm(mpirun, slurm):
    found = launched(slurm | mpirun)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 4, 1, 2)


@pytest.mark.parametrize(
    "environ", [SLURM_BATCH, {"PATH": "/bin"}, OPENMPI | {"OMPI_COMM_WORLD_SIZE": ""}]
)
def test_other_environments_are_no_launch(environ):
    assert launched(environ) is None


def test_the_shell_of_an_allocation_is_no_launch():
    shell = SRUN | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    assert launched(shell) is None
    assert unstarted(shell).size == 8


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        (SLURM_BATCH, 8),
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}, 2),
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}, 1),
    ],
)
def test_number_of_ranks_of_a_job_is_read_in_a_batch_script(environ, size):
    assert unstarted(environ).size == size


@pytest.mark.parametrize("environ", [{}, SRUN, SLURM_BATCH | OPENMPI, SLURM_BATCH | TORCHRUN])
def test_a_process_outside_of_a_job_and_a_rank_have_nothing_to_start(environ):
    assert unstarted(environ) is None


def test_a_step_narrower_than_its_job_counts_its_own_tasks():
    found = launched(SLURM_BATCH | {"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"})
    assert found is not None
    assert found.size == 1


@pytest.mark.parametrize(
    ("environ", "name", "job"),
    [
        (SRUN, "slurm", "77"),
        (JSRUN, "lsf", "77"),
        (PALS, "pbs", "77.host"),
        ({"FLUX_JOB_ID": "f1"}, "flux", "f1"),
        ({"PE_HOSTFILE": "/var/hosts", "JOB_ID": "5"}, "sge", "5"),
        ({"JOB_ID": "5"}, "", ""),
        (OPENMPI, "", ""),
    ],
)
def test_a_job_is_called_as_its_scheduler_calls_it(environ, name, job):
    assert (scheduler(environ), job_id(environ)) == (name, job)


def test_tuning_variables_are_distinguished_from_job_variables():
    environ = {"UCX_TLS": "tcp", "OMPI_MCA_btl_tcp_links": "2", "OMPI_COMM_WORLD_RANK": "3"}
    assert tuning(environ) == {"UCX_TLS": "tcp", "OMPI_MCA_btl_tcp_links": "2"}


def test_temporary_folders_of_slurm_precede_the_standard_ones():
    environ = {"TMPDIR": "/tmp/7", "SLURM_TMPDIR": "/local/7", "HOME": "/"}
    assert scratch_folders(environ) == [Path("/local/7"), Path("/tmp/7")]
    assert scratch_folders({"TMPDIR": ""}) == []
