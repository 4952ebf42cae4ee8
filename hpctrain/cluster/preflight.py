"""Checks of launcher, MPI library, world and cores before the first collective.

The functions are pure: callers pass facts about the launch and the machine. Not collective.
"""

from collections.abc import Sequence
from pathlib import Path

from hpctrain.cluster.env import COUNTS_TASKS, Launched
from hpctrain.cluster.libraries import Family, distinct, mpirun_of, owner, srun_type
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.core.errors import LaunchError
from hpctrain.core.units import format_numbers

FIX: dict[tuple[str, Family], str] = {
    ("flux", "openmpi"): "`flux run -o pmi=pmix ...`",
    ("flux", "mpich"): "`flux run -o pmi=simple ...`",
    ("PALS mpiexec", "openmpi"): "`mpiexec --pmi=pmix ...`",
    ("PALS mpiexec", "mpich"): "`mpiexec --pmi=pmi2 ...`",
}
"""Commands that select the process management interface of an MPI family, by launcher.

See ``srun_type`` for srun.
"""


_SHOWN = 4  # largest number of accelerator sets in a warning

ALONE = "HPCTRAIN_ALONE=1"  # allows a world of one rank in a launch of several ranks


def check_world(
    launched: Launched | None,
    size: int,
    libraries: Sequence[Path],
    starter: Path | None = None,
) -> None:
    """Raise if each rank is a separate MPI world, or if two MPI libraries are loaded.

    Local: ranks without a common world cannot communicate. All ranks raise, because all ranks
    load the same libraries.

    Args:
        launched: the launch, or None if no launcher started this process.
        size: number of ranks of ``MPI_COMM_WORLD``.
        libraries: MPI libraries that this process loaded.
        starter: program that started the rank, for the error message.

    Raises:
        LaunchError: the ranks do not form one world, or the process loaded two libraries.
    """
    found = distinct(libraries)
    if len(found) > 1:
        raise LaunchError(
            f"a process must load one MPI library, but this process has loaded "
            f"{' and '.join(map(str, found))}; keep the library whose mpirun starts the ranks: "
            f"`pip uninstall` the wheel of the other library, remove it from LD_LIBRARY_PATH and "
            f"LD_PRELOAD, or rebuild the package that loads it"
        )
    if launched is None or size > 1 or launched.size == 1:
        return
    library = found[0] if found else None
    if not launched.by_mpi:
        raise LaunchError(
            f"all ranks of a launch must form one world by MPI, but {launched.name} started "
            f"{launched.size} ranks ({launched.source}) without MPI, and each rank would train "
            f"alone; start the ranks with `hpctrain launch -n {launched.size} -- python ...`, or "
            f"in a Slurm job with `srun python ...`; {ALONE} lets each rank train alone"
        )
    raise LaunchError(
        f"all ranks of a launch must form one world, but {_starter_text(launched, starter)} "
        f"started {launched.size} ranks ({launched.source}) and the world of MPI "
        f"({library or 'library unknown'}) has size {size}; {_fix(launched, library)}"
    )


def check_job(job: Launched | None, library: Path | None, *, is_typed: bool = False) -> str | None:
    """Check that a process without a launcher is not in a job of several ranks.

    Such a process would train alone. In an interactive process, the check only returns a
    warning. The same applies to a job of a scheduler that counts slots, because slots may be the
    cores of one task.

    Args:
        job: the job, from ``env.unstarted``; None outside of a job.
        library: the MPI library of this process, for the command in the message.
        is_typed: whether the process is interactive.

    Returns:
        The warning; None if the process is not in a job of several ranks.

    Raises:
        LaunchError: the process would train alone; the message has the command for all ranks.
    """
    if job is None or job.size == 1:
        return None
    by_srun = ""
    if job.name == "Slurm":
        by_srun = f"`srun{f' --mpi={srun_type(library)}' if library else ''} python ...` or "
    found = f"this {job.name} job is for {job.size} ranks ({job.source})"
    remedy = (
        f"start the ranks with {by_srun}`hpctrain launch -n {job.size} -- python ...`; {ALONE}"
    )
    if is_typed or job.name not in COUNTS_TASKS:
        return f"this process trains alone, but {found}; {remedy} allows that without a warning"
    raise LaunchError(
        f"all ranks of a job must form one world, but {found} and no launcher has started "
        f"this process, which would train alone; {remedy} allows that"
    )


def core_warning(topology: Topology) -> str | None:
    """Return a warning if ranks share cores, or None.

    The text is identical on all ranks that share cores, so that a log can merge the warnings.
    """
    ranks = topology.shared_cores
    if not ranks:
        return None
    host = topology.hosts[topology.node].partition("#")[0]
    return (
        f"each rank must have its own core for full speed, but {len(ranks)} ranks share "
        f"{topology.num_peer_cores} cores of {host} (mask {format_numbers(topology.cores)}); "
        "start fewer ranks, or give each rank a core: srun --cpus-per-task=1, mpirun --bind-to "
        "none"
    )


_ISOLATED = (
    "the host sums their gradients; make all GPUs of a node visible to all ranks: in Slurm with "
    "#SBATCH --gpus-per-node and without --gpus-per-task, or srun --gpu-bind=none"
)


def accelerator_warning(facts: Sequence[RankFacts], rank: int) -> str | None:
    """Return a warning if ranks of a host share GPUs or see different GPUs, or None.

    The text is identical on all ranks of a host, so that a log can merge the warnings.
    """
    host = facts[rank].host
    here = [one for one in facts if one.host == host]
    devices = min(one.devices for one in here)
    seen = sorted({",".join(sorted(one.visible.split(","))) for one in here})
    if not devices:
        return None
    if len(seen) > 1:
        shown = "; ".join(seen[:_SHOWN]) + "; ..." * (len(seen) > _SHOWN)
        rule = "ranks of a host must see the same accelerators to access their memory"
        return f"{rule}, but ranks of {host} see different accelerators ({shown}): {_ISOLATED}"
    if len(here) > devices:
        share = f"{len(here)} ranks of {host} share {devices} accelerator{'s' * (devices > 1)}"
        return f"each rank must have its own accelerator, but {share}; start {devices} on a node"
    return None


def threads_for(num_cores: int, num_sharing: int, quota: float | None = None) -> int:
    """Return the number of threads of a rank, at least 1.

    Args:
        num_cores: cores in the affinity mask of the rank.
        num_sharing: ranks with these cores in their mask.
        quota: CPU quota of the container, which its ranks share.
    """
    cores = num_cores if quota is None else min(num_cores, int(quota))
    return max(1, cores // max(1, num_sharing))


def _starter_text(launched: Launched, starter: Path | None) -> str:
    interface = f" --mpi={launched.pmi}" if launched.pmi else ""
    program = f" ({starter})" if starter else ""
    return f"{launched.name}{interface}{program}"


def _fix(launched: Launched, library: Path | None) -> str:
    """Return the command that starts all ranks in one world."""
    again = f"start again with `hpctrain launch -n {launched.size} ...`"
    if library is None:
        return again
    if launched.name == "srun":
        inside = "or inside the job with `hpctrain launch ...`"
        return f"start again with `srun --mpi={srun_type(library)} ...`, {inside}"
    if fix := FIX.get((launched.name, owner(library))):
        return f"start again with {fix}, or inside the job with `hpctrain launch ...`"
    own = mpirun_of(library)
    program = f" or with {own}, the mpirun of this MPI" if own else ""
    return f"{again}{program}; if another launch has set {launched.size_variable}, unset it"
