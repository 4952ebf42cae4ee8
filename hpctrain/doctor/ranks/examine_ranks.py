"""Examination of all ranks of a launch: collect facts, measure links, run the checks."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch

from hpctrain import __version__
from hpctrain.cluster import env
from hpctrain.cluster.env import Launched
from hpctrain.cluster.libraries import expected_libmpi, mismatch
from hpctrain.cluster.resources import affinity
from hpctrain.comm import mpi_library
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import Device, device_of
from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.nccl.nccl_communicator import asked_over
from hpctrain.core.config import PREFIX, Settings
from hpctrain.core.errors import ConfigError, LaunchError, NodeMemoryError
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.facts import (
    Facts,
    GpuNetworkFacts,
    MemoryFacts,
    MpiFacts,
    TrafficFacts,
    VisibleGpus,
    WorldFacts,
)
from hpctrain.doctor.checks.node import THREAD_VARIABLES
from hpctrain.doctor.checks.table import examine, examine_all
from hpctrain.doctor.ranks.traffic import links_between, links_inside
from hpctrain.runtime.abort import FailureHooks, leave


def probe(facts: Facts, *, seconds: float = 5.0) -> list[Finding]:
    """Examine all ranks of this launch. Collective.

    If the launched processes do not form one MPI world, each process returns its own findings.

    Args:
        facts: facts of this rank.
        seconds: approximate time for measurements between many nodes; few nodes need less.

    Returns:
        The merged findings of the ranks, followed by the findings of the checks of the launch;
        identical on every rank.

    Raises:
        RankLostError: a rank did not arrive within ``HPCTRAIN_TIMEOUT``.
    """
    local = examine(facts)
    if refusal := wrong_interface(env.launched(), expected_libmpi()):
        return [*local, refusal]
    try:
        settings = Settings.from_env()
    except ConfigError:  # the check of settings reports the error
        settings = Settings()
    try:
        with _connected(settings) as (found, obstacles):
            comm = found.comm
            gathered = comm.allgather_object((_of_rank(facts, comm.size), local))
            world = _world_of(found, settings, [of_rank for of_rank, _ in gathered], seconds)
            world = replace(world, obstacles=obstacles)
            findings = examine_all(world, [own for _, own in gathered])
            # Some findings differ between ranks, so all ranks return the findings of rank 0.
            return comm.broadcast_object(findings)
    except LaunchError as error:
        what, _, remedy = str(error).partition("; ")
        return [*local, Finding("world", "error", what, remedy)]


def wrong_interface(
    launched: Launched | None, library: Path | None, prefix: str = sys.prefix
) -> Finding | None:
    """Return an error if launcher and MPI use different process management interfaces (PMI).

    With different interfaces, ``MPI_Init`` can end the process. This function checks only an MPI
    library that a Python package has installed below ``prefix``; the interface of other libraries
    is unknown.
    """
    if library is None or not library.is_relative_to(prefix):
        return None
    what, do = mismatch(launched, library)
    return Finding("world", "error", what, do) if what else None


def _world_of(
    found: Connection, settings: Settings, ranks: Sequence[Facts], seconds: float
) -> WorldFacts:
    """Measure the links between the ranks, and return the facts of the world. Collective."""
    comm, topology = found.comm, found.topology
    launched, settings, notes = comm.broadcast_object((env.launched(), settings, found.notes))
    inside = links_inside(comm, topology)
    fast = [adapter.name for adapter in ranks[comm.rank].network.adapters if adapter.is_fast]
    between, carried = links_between(comm, topology, tuple(fast), seconds)
    return WorldFacts(
        ranks=ranks,
        topology=topology,
        launched=launched,
        mpi=mpi_library.version() if comm.size > 1 else "no MPI",
        settings=settings,
        engine=found.plan.engine,
        node_memory=found.plan.node_memory,
        overlap=found.plan.overlap,
        notes=notes,
        nccl=_nccl(comm, topology.host_rank),
        plan=_in_sentences(found),
        traffic=TrafficFacts(inside=inside, between=between, carried=carried),
    )


def _of_rank(facts: Facts, size: int) -> Facts:
    """Return the facts of this rank that the checks compare between ranks."""
    compared = (PREFIX, *env.TUNING, *THREAD_VARIABLES, "SLURM_CPUS_PER_TASK")
    versions = {**facts.versions, "hpctrain": __version__, "torch": torch.__version__}
    visible = facts.visible
    if torch.cuda.is_available():  # UUIDs are equal in all processes of a machine
        numbers = range(torch.cuda.device_count())
        pairs = combinations(numbers, 2)
        visible = VisibleGpus(
            names=tuple(str(torch.cuda.get_device_properties(i).uuid) for i in numbers),
            by_torch=True,
            no_peers=tuple(p for p in pairs if not torch.cuda.can_device_access_peer(*p)),
        )
    mpi = MpiFacts()
    if size > 1:
        versions["MPI library"] = mpi_library.version()
        mpi = MpiFacts(thread_level=mpi_library.thread_level())
    return replace(
        facts,
        cores=replace(facts.cores, mask=affinity()),  # after the ranks have bound themselves
        environ={name: text for name, text in facts.environ.items() if name.startswith(compared)},
        versions=versions,
        mpi=mpi,
        memory=MemoryFacts(),
        gpu_network=GpuNetworkFacts(),
        directories=(),
        visible=visible,
    )


def _nccl(comm: Communicator, host_rank: int) -> tuple[str, str]:
    """Return the NCCL version, and the reason why NCCL cannot sum over all ranks. Collective.

    The reason is empty if NCCL can. Both are empty if no rank has a GPU.
    """
    count = torch.cuda.device_count()
    if not any(comm.allgather_object(count)):
        return "", ""
    own = torch.device("cuda", host_rank % count) if count else torch.device("cpu")
    return asked_over(comm, device_of(own) or Device(own))


@contextmanager
def _connected(settings: Settings) -> Iterator[tuple[Connection, list[Finding]]]:
    """Connect all ranks as for training; disconnect the ranks after the block. Collective.

    Yields the connection, and a finding for a requested feature that is not available; the ranks
    then connect without this feature. ``hpctrain.init`` is not called. The settings of rank 0
    apply to all ranks.

    Raises:
        LaunchError: launcher, MPI library and world do not match.
        RankLostError: a rank did not arrive within the timeout of the settings.
    """
    ranks = find_world(timeout_s=settings.timeout)
    # The hooks stay installed after an error, and end all ranks.
    hooks = FailureHooks(ranks, settings.log_dir) if ranks else None
    threads = torch.get_num_threads()
    obstacles: list[Finding] = []
    try:
        found = connect(ranks, settings)
    except (ConfigError, NodeMemoryError, LaunchError) as error:  # LaunchError by Horovod
        obstacles = [_obstacle(error)]
        engine = "hpctrain" if isinstance(error, LaunchError) else settings.engine
        settings = replace(settings, plan=None, shared_memory="auto", engine=engine)
        found = connect(ranks, settings)
    yield found, obstacles
    torch.set_num_threads(threads)
    if found.presence is not None and hooks is not None:
        leave(found.presence, hooks)
    found.comm.close()
    if hooks is not None:
        hooks.uninstall()


def _obstacle(error: ConfigError | NodeMemoryError | LaunchError) -> Finding:
    name, do = {
        ConfigError: ("plan", "unset HPCTRAIN_PLAN, or measure again"),
        NodeMemoryError: ("node memory", "set HPCTRAIN_SHARED_MEMORY=auto"),
        LaunchError: ("engine", "`hpctrain horovod build`, or HPCTRAIN_ENGINE=hpctrain"),
    }[type(error)]
    return Finding(name, "error", str(error), do)


def _in_sentences(found: Connection) -> list[str]:
    """Return sentences about the plan of a connection: choices, origin and measured times."""
    rows = [f"{name} {text}" for name, text in found.plan.describe()]
    sentences = [f"{'; '.join(rows)}; chosen by {found.plan_origin}"]
    for what, where in (("rail", "between nodes"), ("tensors", "over all ranks")):
        table = found.plan.measurements(what)
        for size, *cells in table[1:]:
            pairs = zip(table[0][1:], cells, strict=True)
            times = ", ".join(f"{name} {cell}" for name, cell in pairs if cell)
            sentences.append(f"{size} {where}: {times}")
    return sentences
