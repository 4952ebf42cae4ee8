"""Environment variables of launchers and schedulers, in one table.

The launchers of MPI precede Slurm in the table: under ``mpirun`` in a Slurm job every rank
inherits ``SLURM_PROCID=0`` and ``SLURM_LOCALID=0`` from the batch script. For the same reason, the
variables of Slurm are used only inside a job step. Launchers of ``torch.distributed`` are first,
because srun may start one on each node.

Sources: the manuals of the launchers, and the environments recorded in this file's test.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.core import config


@dataclass(frozen=True, slots=True)
class Launcher:
    """Names of the variables that a launcher sets.

    A field may list several names, separated by spaces; the first variable that is set counts.
    """

    name: str  # name of the launcher in ``Topology.launcher`` and in messages
    rank: str  # rank in the world; empty if only the size is known
    size: str  # ranks of the world; empty if only the rank is known
    local_rank: str = ""  # rank on this node
    local_size: str = ""  # ranks on this node
    needs: str = field(default="", kw_only=True)
    """Further variables that must be set for this launcher to apply."""
    pmi: str = field(default="", kw_only=True)
    """Variable with the requested process management interface."""
    by_mpi: bool = field(default=True, kw_only=True)  # whether MPI connects the ranks


def _four(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"


_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE LOCAL_SIZE")

LAUNCHERS = (
    # Also under `accelerate launch` and `torch.distributed.launch`.
    Launcher("torchrun", *_TORCH, needs="TORCHELASTIC_RUN_ID", by_mpi=False),
    Launcher("deepspeed", *_TORCH, needs="CROSS_SIZE MASTER_ADDR", by_mpi=False),
    # Spectrum MPI under jsrun also sets the variables of Open MPI, so jsrun precedes it.
    Launcher("jsrun", *_four("JSM_NAMESPACE_")),
    Launcher("Open MPI mpirun", *_four("OMPI_COMM_WORLD_")),
    # Hydra starts ranks of MPICH and Intel MPI; MPI_LOCALRANKID is set by no other launcher.
    Launcher(
        *("MPICH mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        needs="MPI_LOCALRANKID",
    ),
    Launcher("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher(
        "PALS mpiexec",
        "PALS_RANKID PMI_RANK",
        "PMI_SIZE PALS_LOCAL_SIZE",  # under PMIx only the latter is set
        "PALS_LOCAL_RANKID PMI_LOCAL_RANK",
        "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
        needs="PALS_RANKID",
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        # The allocation may be larger than the step: `srun -n 1` in a job of 8 has one rank.
        "SLURM_STEP_NUM_TASKS SLURM_NTASKS",
        "SLURM_LOCALID",
        needs="SLURM_STEP_ID",
        pmi="SLURM_MPI_TYPE",
    ),
    Launcher("a PMI launcher", *_four("PMI_")),
    # Last: scripts for srun export these names themselves.
    Launcher("a launcher of torch.distributed", *_TORCH, needs="MASTER_ADDR", by_mpi=False),
)

_NODEFILE = "PBS_NODEFILE"
_IN_NODEFILE = f"{_NODEFILE}:lines"  # the number of lines of that file

JOBS = (
    Launcher("PMIx", "PMIX_RANK", ""),
    Launcher("Slurm", "", "SLURM_NTASKS SLURM_JOB_NUM_NODES SLURM_NNODES", needs="SLURM_JOB_ID"),
    Launcher("PBS", "", f"{_IN_NODEFILE} PBS_NP", needs="PBS_JOBID"),
    Launcher("LSF", "", "LSB_DJOB_NUMPROC", needs="LSB_JOBID"),
    Launcher("SGE", "", "NSLOTS", needs="PE_HOSTFILE"),
)
"""Variables with the number of ranks of a job, in a process that no launcher has started.

Such a process is a batch script, or the shell of ``salloc``. Flux removes its variables there.
"""

COUNTS_TASKS = ("PMIx", "Slurm")
"""Entries of ``JOBS`` that count tasks; other entries count slots, maybe several for one task."""

_TASKS = re.compile(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*")

_NO_RANKS = 0xFFFFFFF0
"""Smallest id of Slurm steps that launch no ranks, such as the shell of ``salloc``."""

SCHEDULERS = {
    "slurm": "SLURM_JOB_ID",
    "lsf": "LSB_JOBID",
    "flux": "FLUX_JOB_ID",
    "pbs": "PBS_JOBID",
    "sge": "PE_HOSTFILE",
}
"""Name of each scheduler, with a variable that is set in all of its jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """Rank and size of this process, from the variables of its launcher."""

    name: str  # name of the launcher, from the table
    rank: int  # rank in the world
    size: int  # ranks in the world
    local_rank: int | None  # rank on the node; None if unknown
    local_size: int | None  # ranks on the node; None if unknown
    pmi: str
    """Process management interface of the step, such as ``pmix`` or ``none``; empty if unknown."""
    source: str
    """Variable and value from which ``size``, or else the rank, was read, for messages."""
    by_mpi: bool = True  # whether this launcher's ranks are connected by MPI

    @property
    def size_variable(self) -> str:
        """Name of the variable in ``source``."""
        return self.source.partition("=")[0]


WATCHED, ASKED = config.variable_of("watched"), config.variable_of("asked")
BEGUN = "hpctrain: all ranks have started"
ENDED = "hpctrain: all ranks have finished"
"""Lines that rank 0 of a world writes to stderr, once each, for ``launch.supervise``."""

EXIT_CODE_FILE = "exit_code"
"""File in the run directory of a user's program: exit code of the last job that has ended."""

ENDING = "hpctrain: all ranks end with exit code "
"""Line of a rank, with the code, that requests the launcher to end all ranks."""

TUNING = (
    *("OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_coll"),
    *("UCX_", "FI_", "MPIR_CVAR_", "I_MPI_FABRICS"),
)
"""Prefixes of variables by which users tune their MPI library.

Other variables of MPI libraries differ between jobs.
"""

SPARED = {"OMPI_MCA_btl": "^ofi"}
"""Variables that hpctrain sets for ranks of Open MPI, see ``libraries.may_spare_ofi``."""

COPIES_OFF = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}
"""Variables of Open MPI 4 and MPICH 5 for ranks that cannot read the memory of each other."""


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Return rank and size of this process, from the first of ``LAUNCHERS`` that applies.

    None in a process that no known launcher started. A torchrun with one process does not count,
    because srun may have started several torchrun.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) >= _NO_RANKS:
        environ = {name: text for name, text in environ.items() if name != "SLURM_STEP_ID"}
    return _find(LAUNCHERS, environ)


def unstarted(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the number of ranks of this job, for a process that no launcher has started.

    Returns None outside of a job, in a process that a launcher has started, and if the job sets no
    variable with the number.
    """
    if launched(environ):
        return None
    with suppress(KeyError, OSError):
        hosts = Path(environ[_NODEFILE]).read_bytes().split()
        environ = {**environ, _IN_NODEFILE: str(len(hosts))}
    return _find(JOBS, environ)


def _find(launchers: Sequence[Launcher], environ: Mapping[str, str]) -> Launched | None:
    for launcher in launchers:
        rank, size = _first(environ, launcher.rank), _first(environ, launcher.size)
        if (
            (launcher.rank and rank is None)
            or (launcher.size and size is None)
            or not all(name in environ for name in launcher.needs.split())
        ):
            continue
        number = int(environ[rank]) if rank else 0
        # PALS under PMIx sets only the size of the node, and a PMIx launcher sets no size.
        num_ranks = max(int(environ[size]) if size else 1, number + 1)
        if num_ranks == 1 and not launcher.by_mpi:
            continue
        source = size if size and int(environ[size]) == num_ranks else rank or ""
        return Launched(
            name=launcher.name,
            rank=number,
            size=num_ranks,
            local_rank=_number(environ, launcher.local_rank),
            local_size=_number(environ, launcher.local_size),
            pmi=environ.get(launcher.pmi, ""),
            source=f"{source}={environ[source]}",
            by_mpi=launcher.by_mpi,
        )
    return None


def scheduler(environ: Mapping[str, str] = os.environ) -> str:
    """Return the scheduler of the job of this process; empty outside of a job."""
    return next((name for name, variable in SCHEDULERS.items() if variable in environ), "")


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return the scheduler's id of this job, or an empty string."""
    name = scheduler(environ)
    variable = "JOB_ID" if name == "sge" else SCHEDULERS.get(name, "")
    return environ.get(variable, "")


def asked_by() -> str:
    """Return the signal that ``hpctrain launch`` on this host received; empty if unknown."""
    file = config.setting("asked")
    try:
        return file.read_text(encoding="ascii") if file else ""
    except (OSError, ValueError):
        return ""


STOPPED = 85  # exit code of a run that has saved its state to be resumed
RANK_LOST = 87  # exit code of all ranks after one of them was lost

STOPPING = "stopping"  # file in the folder of a run whose ranks have agreed to stop


def run_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the run directory that a batch script sets for a user program; None if unset."""
    text = environ.get("RUN_DIRECTORY")
    return Path(text) if text else None


def tuning(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that tune the MPI library and its network."""
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(TUNING) and SPARED.get(name) != text
    }


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible_devices(environ: Mapping[str, str] = os.environ) -> str:
    """Return the visible accelerators of this process; empty if no variable is set."""
    return next((environ[name] for name in _VISIBLE if environ.get(name)), "")


def slurm(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the variable ``SLURM_NAME``; empty if it is not set."""
    return environ.get(f"SLURM_{name.upper()}", "")


def slurm_clusters(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the cluster for sbatch only, and the cluster for all commands; empty if unset."""
    return environ.get("SBATCH_CLUSTERS", ""), environ.get("SLURM_CLUSTERS", "")


def slurm_number(name: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return a number from a variable of Slurm: 4 for ``4,2``; None for an unset variable."""
    return number(slurm(name, environ))


def number(text: str) -> int | None:
    """Parse a positive number, or the first number of a list; None for any other text."""
    first = text.partition(",")[0]
    return int(first) if first.isdigit() and int(first) > 0 else None


def ranks_per_node(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that this node has or will have; None if unknown."""
    found = launched(environ)
    if found and found.local_size:
        return found.local_size
    step = slurm("step_tasks_per_node", environ) if slurm("step_id", environ) else ""
    counts = tasks_of_nodes(step or slurm("tasks_per_node", environ))
    node = slurm("nodeid", environ) or "0"
    if node.isdigit() and int(node) < len(counts):
        return counts[int(node)]
    return max(counts, default=None)


def gpus_of_job(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of GPUs of the job on this node; None if unknown."""
    if (count := slurm("gpus_on_node", environ).partition(",")[0]).isdigit():
        return int(count)
    names = slurm("job_gpus", environ) or slurm("step_gpus", environ)
    return len(names.split(",")) if names else None


def scratch_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders for temporary files of this job, Slurm's first."""
    texts = slurm("tmpdir", environ), environ.get("TMPDIR", "")
    return [Path(text) for text in texts if text]


def srun_passes_cores(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if srun passes the number of cores per task from the job to the ranks.

    srun 22.05 and newer do this only if a variable is set.
    """
    return "SRUN_CPUS_PER_TASK" in environ


def chosen_library(environ: Mapping[str, str] = os.environ) -> str:
    """Return the MPI library that the user selects for mpi4py; empty if none."""
    return environ.get("MPI4PY_LIBMPI", "")


def chooses_copies(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user selects the mechanism of copies between processes in Open MPI 5."""
    return "OMPI_MCA_smsc" in environ


def torch_finds_ranks(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher of ``torch.distributed`` has set a rendezvous address."""
    return "MASTER_ADDR" in environ or "TORCHELASTIC_USE_AGENT_STORE" in environ


def sets_threads(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user sets the number of threads per process."""
    return "OMP_NUM_THREADS" in environ


SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"


def ranks_share_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether NCCL accepts several ranks on one GPU."""
    return environ.get(SHARES_GPUS) == "1"


def set_torch_ranks(rank: int, size: int, local_rank: int, local_size: int) -> None:
    """Set the variables of torchrun to new ranks and sizes, if torchrun set these variables."""
    if "WORLD_SIZE" in os.environ:
        place = rank, size, local_rank, local_size
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        os.environ.update({name: str(value) for name, value in zip(names, place, strict=True)})


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables inside this context; a value of None removes the variable."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, text in values.items():
        os.environ.pop(name, None)
        if text is not None:
            os.environ[name] = text


_JOB = ("cluster_name", "job_partition", "job_account", "job_qos", "job_nodelist", "cpus_per_task")


def job_facts(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return facts of a Slurm job by name, such as partition and nodes; empty outside of a job."""
    facts = {name: slurm(name, environ) for name in _JOB}
    return {name.removeprefix("job_"): text for name, text in facts.items() if text}


def loaded_modules(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the loaded environment modules, of Lmod or Environment Modules."""
    return [name for name in environ.get("LOADEDMODULES", "").split(":") if name]


def ranks_of_nodes(environ: Mapping[str, str] = os.environ) -> tuple[int, ...] | None:
    """Return the number of ranks of each node, in order; None if unknown."""
    found = launched(environ)
    if found is None:
        return (1,)
    if found.local_size == found.size:
        return (found.size,)
    text = slurm("step_tasks_per_node", environ) if found.name == "srun" else ""
    nodes = tasks_of_nodes(text)
    return tuple(nodes) if sum(nodes) == found.size else None


def tasks_of_nodes(text: str) -> list[int]:
    """Parse the tasks of each node in Slurm's form, ``2(x3),1``; empty for any other text."""
    if not _TASKS.fullmatch(text):
        return []
    groups = [group.rstrip(")").partition("(x") for group in text.split(",")]
    return [int(tasks) for tasks, _, times in groups for _ in range(int(times or 1))]


def _first(environ: Mapping[str, str], names: str) -> str | None:
    """Return the first variable in ``names`` that is set to a number; None if there is none."""
    return next((name for name in names.split() if environ.get(name, "").isdigit()), None)


def _number(environ: Mapping[str, str], names: str) -> int | None:
    name = _first(environ, names)
    return None if name is None else int(environ[name])
