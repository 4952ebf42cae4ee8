"""Checks of the resources that the ranks of a node share: cores, threads, memory, open files."""

import math
from collections.abc import Sequence
from pathlib import Path

from hpctrain.cluster import preflight
from hpctrain.cluster.env import (
    launched,
    number,
    ranks_per_node,
    slurm,
    slurm_number,
    tasks_of_nodes,
)
from hpctrain.cluster.libraries import family
from hpctrain.cluster.preflight import threads_for
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.core.units import MIB, format_bytes, format_numbers, format_ranks, plural
from hpctrain.doctor.checks.check import Found, error, few, note, ok, warning
from hpctrain.doctor.checks.facts import Facts, WorldFacts, by_host
from hpctrain.doctor.checks.network import slow_settings

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_GIVE = (
    "srun --cpus-per-task=N (srun ignores the value of sbatch), or --cpu-bind=none, mpirun "
    "--bind-to none, or `hpctrain launch -n N ...`; in a container --cpuset-cpus; no taskset"
)


def check_masks(ranks: Sequence[Facts]) -> Found:
    """Report ranks that share cores, and ranks that may not use the cores of their job.

    ``ranks`` contains all ranks of a launch. Before a launch, ``ranks`` contains only the process
    that runs the checks.
    """
    found = []
    for host, members in by_host(ranks).items():
        if crowded := _crowded(members, ranks):
            mask = {core for rank in crowded for core in ranks[rank].cores.mask}
            what = (
                f"each rank must have its own core, but {format_ranks(crowded)} on {host} share "
                f"{plural(len(mask), 'core')} (mask {format_numbers(mask)})"
            )
            found.append(
                warning(what, f"start fewer ranks, or give each rank its own core: {_GIVE}")
            )
        else:
            found += _narrow(host, members, ranks)
    counts = sorted({len(facts.cores.mask) for facts in ranks})
    text = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    quota = ranks[0].cores.quota
    time = "" if quota is None else f", time for {quota:g} of them"
    return few(found) or ok(f"{text} for each rank, enough for all{time}{_map(ranks)}")


def _map(ranks: Sequence[Facts]) -> str:
    """Return the cores of each rank of the first host; empty before a launch."""
    host, members = next(iter(by_host(ranks).items()))
    if len(ranks) == 1:
        return ""
    texts = (f"rank {rank} on {format_numbers(ranks[rank].cores.mask)}" for rank in members)
    return f"; {host}: {', '.join(texts)}"


def _narrow(host: str, members: Sequence[int], ranks: Sequence[Facts]) -> list[Finding]:
    """Return findings about ranks of a host that have less than their share of the job's cores."""
    each = ranks[members[0]].cores.num_granted // _num_sharing(members, ranks)
    narrow = [rank for rank in members if len(ranks[rank].cores.mask) < each]
    if not narrow:
        return []
    first = ranks[narrow[0]]
    cores = first.cores
    who = "this process" if len(ranks) == 1 else f"{format_ranks(narrow)} on {host}"
    asked = slurm_number("cpus_per_task", first.environ) or 0
    # A mask of several cores may be intended.
    is_wrong = len(cores.mask) <= cores.num_siblings or len(cores.mask) < min(asked, each)
    what = (
        f"a rank must be able to use its {plural(each, 'core')}, but {who} may use "
        f"{len(cores.mask)} of {plural(cores.num_granted, 'core')} (mask "
        f"{format_numbers(cores.mask)})"
    )
    return [warning(what, _GIVE) if is_wrong else note(what, _GIVE)]


def check_load(facts: Facts) -> Found:
    """Report a machine that is busy with other processes."""
    load = facts.cores.load
    if load is None:  # the load is unknown, or this process is a rank of a launch
        return ()
    if what := load.fault:
        return warning(what, "top shows the processes; wait for their end, or request whole nodes")
    return ok(load.describe())


def check_threads(ranks: Sequence[Facts]) -> Found:
    """Report variables that set more or fewer threads than a rank has cores.

    ``ranks`` contains all ranks of a launch. Before a launch, ``ranks`` contains only the process
    that runs the checks.
    """
    num_cores = cores_each(ranks)
    asked: dict[tuple[str, int, int], list[int]] = {}
    for rank, facts in enumerate(ranks):
        for name in THREAD_VARIABLES:
            threads = number(facts.environ.get(name, ""))
            if threads is not None and threads != num_cores[rank]:
                asked.setdefault((name, threads, num_cores[rank]), []).append(rank)
    found = []
    for (name, threads, each), who in asked.items():
        where = f" ({format_ranks(who)})" if len(who) < len(ranks) else ""
        what = f"{name} must be at most the cores of a rank, {each}{where}, got {threads}"
        do = f"export {name}={each}, or unset it: hpctrain then sets {each}"
        if threads > each:
            found.append(warning(f"{what}: threads would wait for each other", do))
        else:
            what = f"{name}={threads}, but a rank has {plural(each, 'core')}{where}"
            found.append(note(f"{what}: {each - threads} would be idle", do))
    return found or ok(f"{format_numbers(set(num_cores))} for each rank")


def cores_each(ranks: Sequence[Facts]) -> list[int]:
    """Return the number of cores of each rank; ranks with overlapping masks divide the cores."""
    found = [0] * len(ranks)
    for members in by_host(ranks).values():
        for rank in members:
            cores = ranks[rank].cores
            sharing = len(_peers(rank, members, ranks))
            if len(ranks) == 1:  # before a launch: the ranks may get the same mask
                num_ranks = _num_sharing(members, ranks)
                is_shared = len(cores.mask) * num_ranks > cores.num_granted * cores.num_siblings
                sharing = num_ranks if is_shared else 1
            found[rank] = threads_for(len(cores.mask), sharing, cores.quota)
    return found


def _num_sharing(members: Sequence[int], ranks: Sequence[Facts]) -> int:
    """Return the number of ranks on a host; before a launch, the expected number."""
    return max(len(members), ranks_per_node(ranks[members[0]].environ) or 1)


def _peers(rank: int, members: Sequence[int], ranks: Sequence[Facts]) -> list[int]:
    """Return the ranks of a host whose masks overlap the mask of ``rank``, and ``rank`` itself."""
    mask = set(ranks[rank].cores.mask)
    return [other for other in members if mask & set(ranks[other].cores.mask)]


def _crowded(members: Sequence[int], ranks: Sequence[Facts]) -> list[int]:
    """Return the ranks of a host that share cores and outnumber these cores."""
    found: set[int] = set()
    for rank in members:
        peers = _peers(rank, members, ranks)
        if len(peers) > len({core for other in peers for core in ranks[other].cores.mask}):
            found.update(peers)
    return sorted(found)


SHM = Path("/dev") / "shm"
RANK_BYTES = 512 * MIB  # memory of Python, torch and MPI before a model is created
SEGMENT_BYTES = {"openmpi": 16 * MIB, "mpich": 4 * MIB, "abi": 16 * MIB}
"""Bytes that MPI allocates in /dev/shm for each rank, measured with Open MPI 5 and MPICH 5."""


def check_room(facts: Facts) -> Found:
    """Report that the control group or the machine has too little memory for the ranks."""
    room = min(facts.memory.rooms, key=lambda each: each.left_bytes, default=None)
    if room is None:
        return ok("the available memory is unknown")
    ranks = ranks_per_node(facts.environ) or 1
    what = f"{format_bytes(room.left_bytes)} available in {room.name}"
    if room.left_bytes >= ranks * RANK_BYTES:
        return ok(what)
    return warning(
        f"each rank must have {format_bytes(RANK_BYTES)} of memory for Python, torch and MPI, got "
        f"{what} for {plural(ranks, 'rank')}",
        "request more: #SBATCH --mem=..., docker run --memory=..., or start fewer ranks "
        "on each node",
    )


def check_shared_memory(facts: Facts) -> Found:
    """Report obstacles to shared memory of the ranks of this node."""
    try:
        settings = Settings.from_env(facts.environ)
    except ConfigError:  # another check reports this error
        settings = Settings()
    way, refusal = settings.shared_memory, facts.memory.memfd_error
    if way == "off":
        what = "HPCTRAIN_SHARED_MEMORY=off: gradients of a node are sent by MPI"
        return note(what, "unset HPCTRAIN_SHARED_MEMORY")
    found = [_no_memfd(refusal, way)] if refusal else []
    found += _small_shm(facts)
    room = f"{SHM} has {format_bytes(facts.memory.shm_free_bytes)} free"
    if why := facts.memory.kernel_error:
        do = "unset HPCTRAIN_KERNEL, or `pip install` the package again where `cc` is installed"
        found.append(note(f"sums within a node run without compiled code: {why}", do))
    sums = f"compiled sums with vectors of {facts.memory.vector_bytes} bytes"
    return found or ok(f"memfd; {room}; {sums}")


def check_node_memory(world: WorldFacts) -> Found:
    """Report the method by which the ranks of a node share memory, or an obstacle."""
    way, wanted = world.node_memory, world.settings.shared_memory
    if world.engine == "horovod" and world.topology.size > 1:
        return note("not used: Horovod moves the tensors")
    if way == "alone":
        return ok("one rank: nothing to share")
    if way == "memfd":
        return ok("the ranks of a node share memory by memfd")
    if wanted in ("off", way):
        return note(f"HPCTRAIN_SHARED_MEMORY={wanted}: node memory is {way}")
    crowded = preflight.core_warning(world.topology)
    reason = "; ".join(text for text in world.notes if text != crowded)
    return warning(
        reason or "the ranks of a node must share memory, but do not: MPI sends the gradients",
        "run all ranks of a node in one container, or give them one /proc (--pid=host), and "
        "enough memory",
    )


def _no_memfd(refusal: str, way: str) -> Finding:
    what = f"anonymous shared memory is not available: {refusal}"
    if way == "memfd":
        do = "set HPCTRAIN_SHARED_MEMORY=auto, which then uses MPI"
        return error(f"HPCTRAIN_SHARED_MEMORY=memfd must have memfd, but {what}", do)
    do = "allow memfd_create and fallocate: a container's seccomp profile may forbid them"
    return warning(f"{what}: MPI sends the gradients of a node", do)


def _small_shm(facts: Facts) -> list[Finding]:
    """Return a warning if /dev/shm is too small for the memory that MPI allocates there."""
    ranks = ranks_per_node(facts.environ) or len(facts.cores.mask)
    library = facts.mpi.library
    segment_bytes = SEGMENT_BYTES[family(library)] if library else 0
    needed_bytes = ranks * segment_bytes
    if ranks < 2 or facts.memory.shm_free_bytes >= needed_bytes:
        return []
    return [
        warning(
            f"{SHM} must have {format_bytes(needed_bytes)} for the messages of {ranks} ranks, "
            f"{format_bytes(segment_bytes)} each, but {format_bytes(facts.memory.shm_free_bytes)} "
            f"of {format_bytes(facts.memory.shm_bytes)} are free: a rank without space ends with "
            f"SIGBUS",
            f"enlarge {SHM}: docker run --shm-size=1g, apptainer: bind a larger {SHM}, else "
            f"mount -o remount,size=1g {SHM}; or remove files in it",
        )
    ]


# Measured with Open MPI 5: a rank has 20 file descriptors plus one for each rank to which it is
# connected by TCP, and four threads in addition to the threads of torch. mpirun has 20 descriptors
# plus three for each rank of its node.
BASE_FILES = 64  # includes the files of a data set
FILES_PER_RANK = 3
PEERS_PER_ROUND = 5
"""TCP connections per doubling of the ranks: dissemination, trees and recursive doubling over all
ranks and on rails connect a rank to different ranks."""
BASE_THREADS = 8


def check_limits(facts: Facts) -> list[Finding]:
    """Report limits of file descriptors and threads that are too low for the ranks of the run."""
    environ, limits = facts.environ, facts.limits
    local, launch = ranks_per_node(environ) or 1, launched(environ)
    tasks = sum(tasks_of_nodes(slurm("tasks_per_node", environ)))
    size = max(launch.size if launch else tasks, local)
    is_fast = any(one.is_fast for one in facts.network.adapters) and not slow_settings(environ)
    by_tcp = 0 if is_fast or size == local else size - 1  # the largest number of TCP peers
    peers = min(by_tcp, PEERS_PER_ROUND * (size - 1).bit_length())
    files = BASE_FILES + max(FILES_PER_RANK * local, peers)
    threads = BASE_THREADS * local + facts.cores.num_granted
    run = f"a run of {plural(size, 'rank')}, {local} on this node"
    found = []
    if limits.files < files:
        rule = f"a process must be able to open {files} files for {run}"
        what = f"{rule}, got a limit of {limits.files}"
        found.append(
            warning(f"{what}: MPI fails in init()", _raise_files(files, limits.most_files))
        )
    elif limits.files < (all_files := BASE_FILES + by_tcp):
        what = (
            f"a limit of {limits.files} open files is enough for data parallel training, but "
            f"all-to-all operations over TCP open a connection to each rank, {all_files} files"
        )
        found.append(note(what, _raise_files(all_files, limits.most_files)))
    if limits.threads < threads:
        what = f"a user must be able to start {threads} threads on a node for {run}"
        found.append(
            warning(
                f"{what}, got a limit of {limits.threads}: torch or MPI fails to start threads",
                f"`ulimit -u {threads}` before the launch, a larger limit of processes of the "
                "container (docker run --pids-limit), or fewer ranks on each node",
            )
        )
    text = f"{_limit(limits.files)} open files ({files} needed), {_limit(limits.threads)} threads"
    return found or [ok(f"{text} ({threads} needed) for {run}")]


def _raise_files(num: int, most: float) -> str:
    if most < num:
        return (
            f"ask the administrators for a hard limit of {num} open files, now {most}: "
            "LimitNOFILE of slurmd or docker run --ulimit nofile"
        )
    return f"`ulimit -n {num}` before the launch, with Slurm also `srun --propagate=NOFILE`"


def _limit(num: float) -> str:
    return "any number of" if math.isinf(num) else str(num)
