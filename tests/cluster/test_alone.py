"""Check a process that MPI takes for a world of one, in the environments of real jobs.

The environments of Slurm were recorded with version 22.05. The environments of other launchers
follow their manuals. The tests include only variables that count ranks.
"""

import pytest

from hpctrain.cluster.env import launched, unstarted
from hpctrain.cluster.preflight import check_job, check_world
from hpctrain.core.errors import LaunchError


def variables(text):
    return dict(word.split("=", 1) for word in text.split())


def verdict(environ, *, is_typed=False):
    """Judge a process that MPI takes for a world of one, as ``find_world`` does."""
    try:
        check_world(launched(environ), 1, ())
        text = check_job(unstarted(environ), None, is_typed=is_typed)
    except LaunchError as error:
        return "error", str(error)
    return ("warning", text) if text else ("alone", "")


JOB = "SLURM_JOB_ID=7 SLURM_JOBID=7 SLURM_JOB_NODELIST=n[0-1]"
TWO = f"{JOB} SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2"
SALLOC = f"{TWO} SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_TASKS_PER_NODE=4(x2)"
BATCH = f"{TWO} SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0 SLURM_TASK_PID=42"
SHELL_STEP = f"{BATCH} SLURM_NTASKS=8 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1"
STEP = (
    f"{JOB} SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_PROCID=3 SLURM_LOCALID=3 SLURM_STEP_ID=0 "
    "SLURM_STEPID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4"
)
ONE_TASK = f"{JOB} SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_NPROCS=1 SLURM_TASKS_PER_NODE=1"
ONE_STEP = f"{ONE_TASK} SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1"
OPENMPI_4 = (
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_UNIVERSE_SIZE=4 PMIX_NAMESPACE=1234 PMIX_RANK=3"
)
OPENMPI_5 = f"{OPENMPI_4} PRTE_LAUNCHED=1 PMIX_SERVER_URI41=prterun-h-1"
HYDRA = "PMI_RANK=3 PMI_SIZE=4 PMI_FD=9 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=4 HYDI_CONTROL_FD=7"
TORCH = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1"
TORCHRUN = f"{TORCH} TORCHELASTIC_RUN_ID=none GROUP_RANK=0"
ONE_TORCHRUN = TORCHRUN.replace("=3", "=0").replace("=4", "=1")
ONE_OPENMPI = OPENMPI_5.replace("=3", "=0").replace("=4", "=1")
PALS = "PALS_RANKID=3 PALS_LOCAL_RANKID=3 PALS_LOCAL_SIZE=4 PALS_NODEID=0 PBS_JOBID=9.s"
FLUX = "FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=1 FLUX_TASK_LOCAL_ID=3 FLUX_JOB_ID=f1"
START = "hpctrain launch -n"

ENVIRONMENTS = {
    # Nothing has started the ranks of the job.
    "salloc -n 8": (SALLOC, "error", f"`srun python ...` or `{START} 8 -- python ...`"),
    "salloc -N 2": (TWO, "error", "SLURM_JOB_NUM_NODES=2"),
    "salloc of old, -N 2": (f"{JOB} SLURM_NNODES=2", "error", "SLURM_NNODES=2"),
    "salloc, shell on a node": (SHELL_STEP, "error", f"{START} 8"),
    "sbatch -n 8": (f"{BATCH} SLURM_NTASKS=8", "error", "SLURM_NTASKS=8"),
    "sbatch -N 2": (BATCH, "error", f"{START} 2"),
    "sbatch of an array": (f"{BATCH} SLURM_NTASKS=8 SLURM_ARRAY_TASK_ID=2", "error", START),
    "sbatch, torchrun of one": (f"{BATCH} SLURM_NTASKS=8 {ONE_TORCHRUN}", "error", START),
    "qsub": ("PBS_JOBID=9.s PBS_NODEFILE={nodefile}", "warning", f"{START} 3"),
    "qsub of Torque": ("PBS_JOBID=9.s PBS_NP=8", "warning", f"{START} 8 "),
    "bsub -n 4": ("LSB_JOBID=3 LSB_DJOB_NUMPROC=4", "warning", f"{START} 4"),
    "qsub of SGE": ("PE_HOSTFILE=/h JOB_ID=3 NSLOTS=4", "warning", f"{START} 4"),
    # Ranks were started, and MPI does not connect them.
    "srun --mpi=none": (STEP, "error", "srun"),
    "srun --mpi=pmi2": (
        f"{STEP} SLURM_MPI_TYPE=pmi2 PMI_RANK=3 PMI_SIZE=4",
        "error",
        "--mpi=pmi2",
    ),
    "srun --mpi=pmix": (f"{STEP} SLURM_MPI_TYPE=pmix PMIX_RANK=3", "error", "--mpi=pmix"),
    "srun, torchrun of one each": (f"{STEP} {ONE_TORCHRUN}", "error", "srun"),
    "mpirun of Open MPI 4": (OPENMPI_4, "error", f"{START} 4"),
    "mpirun of Open MPI 5": (OPENMPI_5, "error", f"{START} 4"),
    "mpirun in a batch script": (f"{BATCH} SLURM_NTASKS=8 {OPENMPI_5}", "error", f"{START} 4"),
    "mpirun in a PBS job": (f"{OPENMPI_4} PBS_JOBID=9.s", "error", f"{START} 4"),
    "mpiexec of MPICH": (HYDRA, "error", f"{START} 4"),
    "prterun": ("PMIX_NAMESPACE=p@1 PMIX_RANK=3", "error", "PMIX_RANK=3"),
    "PALS, pmi2": (f"{PALS} PMI_RANK=3 PMI_SIZE=4", "error", "PALS mpiexec"),
    "PALS, pmix": (f"{PALS} PMIX_RANK=3", "error", "PALS mpiexec"),
    "PALS, pmix, a rank a node": (
        PALS.replace("LOCAL_SIZE=4", "LOCAL_SIZE=1").replace("LOCAL_RANKID=3", "LOCAL_RANKID=0"),
        "error",
        "PALS_RANKID=3",
    ),
    "flux run": (FLUX, "error", "flux"),
    "torchrun": (TORCHRUN, "error", f"{START} 4"),
    "torchrun in a step": (f"{ONE_STEP} {TORCHRUN}", "error", f"{START} 4"),
    # One process was requested.
    "a laptop": ("HOME=/root", "alone", ""),
    "salloc -n 1": (ONE_TASK, "alone", ""),
    "sbatch -n 1": (f"{ONE_TASK} SLURM_PROCID=0 SLURM_LOCALID=0", "alone", ""),
    "an array of one task each": (
        f"{ONE_TASK} SLURM_PROCID=0 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=2",
        "alone",
        "",
    ),
    "srun -n 1 in salloc -n 8": (ONE_STEP, "alone", ""),
    "hpctrain launch -n 1 in salloc": (f"{SALLOC} {ONE_OPENMPI}", "alone", ""),
    "torchrun of one": (ONE_TORCHRUN, "alone", ""),
    "qsub of one": ("PBS_JOBID=9.s PBS_NODEFILE={one}", "alone", ""),
    "qsub, without its file": ("PBS_JOBID=9.s PBS_NODEFILE=/nowhere/file", "alone", ""),
    "bsub -n 1": ("LSB_JOBID=3 LSB_DJOB_NUMPROC=1", "alone", ""),
    "flux run -n 1": ("FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1 FLUX_JOB_ID=f1", "alone", ""),
}


@pytest.mark.parametrize(
    ("text", "expected", "named"), ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys()
)
def test_accidental_world_of_one_raises_with_the_command(text, expected, named, tmp_path):
    for name, lines in (("nodefile", "n0\nn0\nn1\n"), ("one", "n0\n")):
        (tmp_path / name).write_text(lines)
        text = text.replace(f"{{{name}}}", str(tmp_path / name))
    found, message = verdict(variables(text))
    assert (found, named in message) == (expected, True), message


@pytest.mark.parametrize("text", [SALLOC, SHELL_STEP, f"{BATCH} SLURM_NTASKS=8"])
def test_a_notebook_or_a_prompt_in_an_allocation_is_warned(text):
    found, message = verdict(variables(text), is_typed=True)
    assert found == "warning"
    assert message.startswith("this process trains alone, but this Slurm job is for 8 ranks")
    assert "HPCTRAIN_ALONE=1 allows that without a warning" in message
