"""Memory is enough for the ranks of a node, and they can share it."""

from pathlib import Path

from hpctrain.cluster import preflight
from hpctrain.cluster.libraries import family
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.core.units import MIB, format_bytes
from hpctrain.doctor.checks.check import check, error, note, ok, plural, warning
from hpctrain.doctor.checks.facts import Facts, WorldFacts
from hpctrain.doctor.checks.job import ranks_per_node

SHM = Path("/dev/shm")  # noqa: S108 - a place to look at
RANK_BYTES = 512 * MIB
"""What Python, torch and MPI take before there is a model."""
SEGMENT_BYTES = {"openmpi": 16 * MIB, "mpich": 4 * MIB, "abi": 16 * MIB}
"""What a rank puts into /dev/shm to talk to the others of its node: measured, Open MPI 5 and
MPICH 5."""


@check("memory")
def check_room(facts: Facts) -> list[Finding]:
    """Name a control group or a machine with no room for the ranks."""
    room = min(facts.memory.rooms, key=lambda each: each.left_bytes, default=None)
    if room is None:
        return [ok("the system does not say how much is left")]
    ranks = ranks_per_node(facts.environ) or 1
    what = f"{format_bytes(room.left_bytes)} left in {room.name}"
    if room.left_bytes >= ranks * RANK_BYTES:
        return [ok(what)]
    return [
        warning(
            f"{what} for {plural(ranks, 'rank')}; each takes about {format_bytes(RANK_BYTES)} "
            "before there is a model",
            "ask for more: #SBATCH --mem=..., docker run --memory=..., or start fewer ranks "
            "on each node",
        )
    ]


@check("node memory")
def check_ways(facts: Facts) -> list[Finding]:
    """Name what will keep the ranks of this node from sharing memory."""
    try:
        settings = Settings.from_env(facts.environ)
    except ConfigError:  # said by another check
        settings = Settings()
    way, refusal = settings.shared_memory, facts.memory.memfd_error
    if way == "off":
        what = "HPCTRAIN_SHARED_MEMORY=off: gradients of a node go through plain MPI"
        return [note(what, "unset HPCTRAIN_SHARED_MEMORY")]
    found = [_no_memfd(refusal, way)] if refusal else []
    found += _small_shm(facts)
    room = f"{SHM} has {format_bytes(facts.memory.shm_free_bytes)} free"
    return found or [ok(f"memfd; {room}")]


@check("node memory")
def check_way(world: WorldFacts) -> list[Finding]:
    """Say which memory the ranks of a node share."""
    way, wanted = world.node_memory, world.settings.shared_memory
    if world.engine == "horovod" and world.topology.size > 1:
        return [note("not used: Horovod moves the tensors")]
    if way == "alone":
        return [ok("one rank: nothing to share")]
    if way == "memfd":
        return [ok("the ranks of a node share memory by memfd")]
    if wanted in ("off", way):
        return [note(f"HPCTRAIN_SHARED_MEMORY={wanted}: node memory is {way}")]
    crowded = preflight.core_warning(world.topology)
    reason = "; ".join(text for text in world.notes if text != crowded)
    return [
        warning(
            reason or "the ranks of a node share no memory: gradients go flat over MPI",
            "run all ranks of a node in one container, or give them one /proc (--pid=host), and "
            "enough memory",
        )
    ]


def _no_memfd(refusal: str, way: str) -> Finding:
    what = f"anonymous shared memory cannot be had: {refusal}"
    if way == "memfd":
        do = "set HPCTRAIN_SHARED_MEMORY=auto, which then takes plain MPI"
        return error(f"HPCTRAIN_SHARED_MEMORY=memfd, but {what}", do)
    do = "allow memfd_create and fallocate: a container's seccomp profile may forbid them"
    return warning(f"{what}; gradients go flat over MPI", do)


def _small_shm(facts: Facts) -> list[Finding]:
    """Compare what is free in /dev/shm with what MPI puts there for the ranks of this node."""
    ranks = ranks_per_node(facts.environ) or len(facts.cores.mask)
    library = facts.mpi.library
    segment_bytes = SEGMENT_BYTES[family(library)] if library else 0
    needed_bytes = ranks * segment_bytes
    if ranks < 2 or facts.memory.shm_free_bytes >= needed_bytes:
        return []
    return [
        warning(
            f"{SHM} has {format_bytes(facts.memory.shm_free_bytes)} free of "
            f"{format_bytes(facts.memory.shm_bytes)}; {ranks} ranks put up to "
            f"{format_bytes(needed_bytes)} there, each {format_bytes(segment_bytes)} of messages: "
            f"a rank that finds it full dies of SIGBUS",
            f"enlarge it: docker run --shm-size=1g, apptainer: bind a larger {SHM}, else "
            f"mount -o remount,size=1g {SHM}; or remove what lies there",
        )
    ]
