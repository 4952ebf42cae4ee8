"""Checks of the job: size, launcher, MPI world, and plan."""

from hpctrain.cluster.env import (
    Launched,
    job_id,
    launched,
    ranks_per_node,
    scheduler,
    slurm,
    slurm_number,
    srun_passes_cores,
)
from hpctrain.cluster.libraries import srun_type
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_ranks, plural
from hpctrain.doctor.checks.check import Found, listed, note, ok, warning
from hpctrain.doctor.checks.facts import Facts, WorldFacts


def check_job(facts: Facts) -> Found:
    """Report the job, its size, and cores that srun does not pass to the ranks."""
    environ, name = facts.environ, scheduler(facts.environ)
    if not name:
        return ok("no job: this looks like a login node or a workstation")
    words = [f"{name} job {job_id(environ)}"]
    if nodes := slurm("job_num_nodes", environ):
        words.append(f"{nodes} nodes {slurm('job_nodelist', environ)}".strip())
    if count := ranks_per_node(environ):
        words.append(f"{count} tasks on this node")
    found = [ok(", ".join(words))]
    cores = slurm_number("cpus_per_task", environ) or 1
    # srun 22.05 and newer do not give the cores of an allocation to its tasks.
    if launched(environ) is None and cores > 1 and not srun_passes_cores(environ):
        what = f"srun must get --cpus-per-task, but only the job has this option ({cores} cores)"
        do = (
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, or use "
            "`srun --cpus-per-task=$SLURM_CPUS_PER_TASK`"
        )
        found.append(note(what, do))
    return found


def check_launcher(facts: Facts) -> Found:
    """Report the launcher of this rank; before a launch, report whether srun can start ranks."""
    offered, library = facts.mpi.srun_types, facts.mpi.library
    if found := launched(facts.environ):
        return ok(f"{found.name}: rank {found.rank} of {found.size} ({found.size_variable})")
    if not offered or library is None:
        return ok("no launcher: this process is the only rank")
    needed = srun_type(library)
    if any(each.startswith(needed) for each in offered):
        return ok(f"no launcher: start ranks with `srun --mpi={needed}` or `hpctrain launch -n N`")
    return warning(
        f"srun must offer --mpi={needed} for {library}, but offers {', '.join(offered)}: ranks "
        "that srun starts would be separate worlds, or fail",
        "start ranks with mpirun inside the job: `hpctrain launch -n N ...`, or "
        "`hpctrain submit --template mpirun`",
    )


def check_world(world: WorldFacts) -> Found:
    """Report a difference between the world of MPI and the variables of the launcher."""
    topology, found = world.topology, world.launched
    size = f"{plural(topology.size, 'rank')} on {plural(topology.num_nodes, 'node')}"
    if found is None:
        return ok(f"{size}, no launcher")
    if found.size in (topology.size, topology.local_size):
        return ok(f"one world of {size}, started by {_by(found)}, {world.mpi}")
    return warning(
        f"all ranks of a launch must form one world, but {_by(found)} started {found.size} "
        f"ranks ({found.size_variable}={found.size}), and the world of {world.mpi} has {size}",
        f"start one program on all ranks; if {found.size_variable} is from another "
        "launch, unset it",
    )


def check_nodes(world: WorldFacts) -> Found:
    """Report nodes with different numbers of ranks."""
    topology = world.topology
    sizes = [len(ranks) for ranks in topology.nodes]
    if topology.is_homogeneous:
        return ok(f"{sizes[0]} on every node")
    few = [host for host, size in zip(topology.hosts, sizes, strict=True) if size == min(sizes)]
    return warning(
        f"nodes must have equal numbers of ranks for full speed, got {min(sizes)} to "
        f"{max(sizes)} ranks, fewest on {listed(few)}",
        "set the number: srun --ntasks-per-node=N, mpirun --map-by ppr:N:node",
    )


def check_level(world: WorldFacts) -> Found:
    """Report whether MPI provides MPI_THREAD_MULTIPLE on all ranks."""
    levels = [facts.mpi.thread_level for facts in world.ranks]
    low = [rank for rank, level in enumerate(levels) if level != "MULTIPLE"]
    if not low:
        return ok("MPI_THREAD_MULTIPLE is granted")
    return warning(
        f"MPI must provide MPI_THREAD_MULTIPLE to send gradients during backward, but provides "
        f"MPI_THREAD_{levels[low[0]]} to {format_ranks(low)}: the plan sends with overlap = "
        f"{world.overlap}",
        "do not lower mpi4py.rc.thread_level or MPICH_MAX_THREAD_SAFETY, or use an MPI that "
        "was built with MPI_THREAD_MULTIPLE; HPCTRAIN_OVERLAP=end works with this MPI",
    )


def report_plan(world: WorldFacts) -> list[Finding]:
    """Report the plan and its origin."""
    return [note(text) for text in world.plan]


def _by(found: Launched) -> str:
    return f"{found.name} --mpi={found.pmi}" if found.pmi else found.name
