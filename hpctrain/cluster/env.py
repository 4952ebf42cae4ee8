"""Environment variables of launchers and schedulers: one table.

MPI's own launchers stand before Slurm: below ``mpirun`` in a Slurm job every rank inherits
``SLURM_PROCID=0`` and ``SLURM_LOCALID=0`` from the batch script. For the same reason Slurm's
word counts inside a step only. Launchers of ``torch.distributed`` stand first: srun starts
one on each node.

Sources: the manuals of the launchers, and the environments recorded in this file's test.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """The variables of one launcher; of several names for a fact the first that is set counts."""

    name: str
    """How the launcher is called in ``Topology.launcher`` and in messages."""
    needs: tuple[str, ...] = ()
    """More variables which must be set for its word to count."""
    rank: tuple[str, ...]
    """Rank in the world."""
    size: tuple[str, ...]
    """Ranks of the world."""
    local_rank: tuple[str, ...] = ()
    """Rank on this node."""
    local_size: tuple[str, ...] = ()
    """Ranks on this node."""
    pmi: str = ""
    """Holds the process management interface that was asked for."""
    by_mpi: bool = True
    """Whether MPI connects the ranks."""


LAUNCHERS = (
    # Also below `accelerate launch` and `torch.distributed.launch`.
    Launcher(
        name="torchrun",
        needs=("TORCHELASTIC_RUN_ID",),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        by_mpi=False,
    ),
    Launcher(
        name="deepspeed",
        needs=("CROSS_SIZE", "MASTER_ADDR"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_SIZE",),
        by_mpi=False,
    ),
    # jsrun's Spectrum MPI sets Open MPI's variables as well, so it comes first.
    Launcher(
        name="jsrun",
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    Launcher(
        name="Open MPI mpirun",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    # Hydra starts the ranks of MPICH and of Intel MPI; others set PMI_RANK too, not this one.
    Launcher(
        name="MPICH mpirun",
        needs=("MPI_LOCALRANKID",),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    Launcher(
        name="flux",
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
    ),
    Launcher(
        name="PALS mpiexec",
        rank=("PALS_RANKID", "PMI_RANK"),
        needs=("PALS_RANKID",),
        size=("PMI_SIZE", "PALS_LOCAL_SIZE"),  # below PMIx it says no more than this
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    Launcher(
        name="srun",
        needs=("SLURM_STEP_ID",),
        rank=("SLURM_PROCID",),
        # The allocation may be wider than the step: `srun -n 1` in a job of 8 is a world of 1.
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        pmi="SLURM_MPI_TYPE",
    ),
    Launcher(
        name="a PMI launcher",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK",),
        local_size=("PMI_LOCAL_SIZE",),
    ),
    # Last: scripts for srun export these names themselves.
    Launcher(
        name="a launcher of torch.distributed",
        needs=("MASTER_ADDR",),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        by_mpi=False,
    ),
)

JOBS = (
    Launcher(
        name="Slurm",
        needs=("SLURM_JOB_ID",),
        rank=("SLURM_PROCID",),
        size=("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"),
    ),
)
"""What schedulers say of the ranks that a job is for, to the process that shall start them."""

_NO_RANKS = 0xFFFFFFF0
"""From here on Slurm numbers steps that are no launch: the shell of ``salloc``, for instance."""

SCHEDULERS = {
    "slurm": "SLURM_JOB_ID",
    "lsf": "LSB_JOBID",
    "flux": "FLUX_JOB_ID",
    "pbs": "PBS_JOBID",
    "sge": "PE_HOSTFILE",
}
"""A variable that is set in every job of a scheduler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What the launcher of this process says about it; MPI has the last word."""

    name: str
    """Name of the launcher, from the table."""
    rank: int
    """Rank in the world."""
    size: int
    """Ranks in the world."""
    local_rank: int | None
    """Rank on the node, where the launcher says it."""
    local_size: int | None
    """Ranks on the node, where the launcher says it."""
    pmi: str
    """Process management interface of the step, such as ``pmix`` or ``none``; empty if unsaid."""
    size_variable: str
    """Where ``size`` was read, for messages."""
    by_mpi: bool = True
    """Whether this launcher's ranks are connected by MPI."""


TUNING = (
    *("OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_coll"),
    *("UCX_", "FI_", "MPIR_CVAR_", "I_MPI_FABRICS"),
)
"""How variables begin by which users tune their MPI library; others differ from job to job."""


def launched(environ: Mapping[str, str] | None = None) -> Launched | None:
    """Read what the launcher says, from the first of ``LAUNCHERS`` that applies.

    Returns:
        ``None`` in a process that no known launcher started.
    """
    environ = os.environ if environ is None else environ
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) >= _NO_RANKS:
        environ = {name: text for name, text in environ.items() if name != "SLURM_STEP_ID"}
    return _said(LAUNCHERS, environ)


def unstarted(environ: Mapping[str, str] | None = None) -> Launched | None:
    """Read how many ranks a job is for, in a process of it that no launcher has started.

    Returns:
        ``None`` outside of a job, in a rank, and where the job does not say it.
    """
    environ = os.environ if environ is None else environ
    return None if launched(environ) else _said(JOBS, environ)


def _said(launchers: Sequence[Launcher], environ: Mapping[str, str]) -> Launched | None:
    for launcher in launchers:
        rank, size = _first(environ, launcher.rank), _first(environ, launcher.size)
        if rank is None or size is None or not all(name in environ for name in launcher.needs):
            continue
        return Launched(
            name=launcher.name,
            rank=int(environ[rank]),
            size=int(environ[size]),
            local_rank=_number(environ, launcher.local_rank),
            local_size=_number(environ, launcher.local_size),
            pmi=environ.get(launcher.pmi, ""),
            size_variable=size,
            by_mpi=launcher.by_mpi,
        )
    return None


def scheduler(environ: Mapping[str, str] | None = None) -> str:
    """Return the scheduler whose job this process is part of, or an empty string."""
    environ = os.environ if environ is None else environ
    return next((name for name, variable in SCHEDULERS.items() if variable in environ), "")


def job_id(environ: Mapping[str, str] | None = None) -> str:
    """Return what the scheduler calls this job, or an empty string."""
    environ = os.environ if environ is None else environ
    name = scheduler(environ)
    variable = "JOB_ID" if name == "sge" else SCHEDULERS.get(name, "")
    return environ.get(variable, "")


ASKED = "HPCTRAIN_ASKED"
"""Names the file in which ``hpctrain launch`` says which signal it hands on as SIGUSR1."""


def asked_by() -> str:
    """Return the signal that ``hpctrain launch`` on this host was sent; empty where none tells."""
    try:
        return Path(os.environ[ASKED]).read_text(encoding="ascii")
    except (KeyError, OSError, ValueError):
        return ""


def tuning(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what the environment says to the MPI library and its network."""
    environ = os.environ if environ is None else environ
    return {name: text for name, text in environ.items() if name.startswith(TUNING)}


def ranks_of_nodes(environ: Mapping[str, str] | None = None) -> tuple[int, ...] | None:
    """Return the ranks of each node, in order; None where the launcher does not say it of all."""
    environ = os.environ if environ is None else environ
    found = launched(environ)
    if found is None:
        return (1,)
    if found.local_size == found.size:
        return (found.size,)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "") if found.name == "srun" else ""
    nodes: list[int] = []
    for group in text.split(",") if text else ():
        ranks, _, times = group.rstrip(")").partition("(x")  # 2(x3): three nodes of two
        if not (ranks.isdigit() and (times.isdigit() or not times)):
            return None
        nodes += [int(ranks)] * int(times or 1)
    return tuple(nodes) if sum(nodes) == found.size else None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first name that is set to a number."""
    return next((name for name in names if environ.get(name, "").isdigit()), None)


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = _first(environ, names)
    return None if name is None else int(environ[name])
