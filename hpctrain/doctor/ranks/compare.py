"""All ranks tell each other what they see, measure what is between them, and hear one verdict."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations

import torch

from hpctrain import __version__
from hpctrain.cluster import env
from hpctrain.comm import mpi_library
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import Device, device_of
from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.nccl.nccl_communicator import asked_over
from hpctrain.core.config import PREFIX, Settings
from hpctrain.core.errors import ConfigError, LaunchError, NodeMemoryError
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.facts import Facts, MemoryFacts, MpiFacts, WorldFacts
from hpctrain.doctor.checks.node import THREAD_VARIABLES
from hpctrain.doctor.checks.table import examine_all
from hpctrain.doctor.ranks.traffic import links_between, links_inside
from hpctrain.runtime.abort import FailureHooks, leave


def compare(facts: Facts, local: list[Finding], seconds: float) -> list[Finding]:
    """Connect all ranks, gather their facts and judge them. Collective.

    Measurements between many nodes take ``seconds``, about. The same on every rank. Raises
    ``LaunchError``: the launcher, the MPI library and the world do not fit together.
    """
    try:
        settings = Settings.from_env()
    except ConfigError:  # a finding of its own
        settings = Settings()
    with _connected(settings) as (found, obstacles):
        comm, topology = found.comm, found.topology
        told = comm.allgather_object((_of_rank(facts, comm.size), local))
        launched, settings, notes = comm.broadcast_object((env.launched(), settings, found.notes))
        inside = links_inside(comm, topology)
        fast = [card.name for card in facts.network.cards if card.is_fast]
        between, carried = links_between(comm, topology, tuple(fast), seconds)
        version, why_not = _nccl(comm, topology.host_rank)
        world = WorldFacts(
            ranks=[of_rank for of_rank, _ in told],
            topology=topology,
            launched=launched,
            mpi=mpi_library.version() if comm.size > 1 else "no MPI",
            settings=settings,
            engine=found.plan.engine,
            node_memory=found.plan.node_memory,
            overlap=found.plan.overlap,
            notes=notes,
            nccl=version,
            why_not_nccl=why_not,
            obstacles=obstacles,
            plan=_in_sentences(found),
            inside=inside,
            between=between,
            carried=carried,
        )
        findings = examine_all(world, [found for _, found in told])
        return comm.broadcast_object(findings)  # some speak of rank 0's own: it tells all


def _of_rank(facts: Facts, size: int) -> Facts:
    """Complete the facts of this rank, and leave out what other ranks have no use for."""
    compared = (PREFIX, *env.TUNING, *THREAD_VARIABLES, "SLURM_CPUS_PER_TASK")
    versions = {**facts.versions, "hpctrain": __version__, "torch": torch.__version__}
    visible, no_peers = facts.visible, list[tuple[int, int]]()
    if torch.cuda.is_available():  # torch's names are the same in all processes of a machine
        numbers = range(torch.cuda.device_count())
        visible = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in numbers)
        pairs = combinations(numbers, 2)
        no_peers = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if size > 1:
        versions["MPI library"] = mpi_library.version()
    return replace(
        facts,
        environ={name: text for name, text in facts.environ.items() if name.startswith(compared)},
        versions=versions,
        mpi=MpiFacts(),
        memory=MemoryFacts(),
        directories=(),
        visible=visible,
        by_torch=torch.cuda.is_available(),
        no_peers=tuple(no_peers),
        thread_level=mpi_library.thread_level() if size > 1 else "MULTIPLE",
    )


def _nccl(comm: Communicator, host_rank: int) -> tuple[str, str]:
    """Return the version of NCCL, and why it cannot sum over all ranks. Collective."""
    count = torch.cuda.device_count()
    if not any(comm.allgather_object(count)):
        return "", ""
    own = torch.device("cuda", host_rank % count) if count else torch.device("cpu")
    return asked_over(comm, device_of(own) or Device(own))


@contextmanager
def _connected(settings: Settings) -> Iterator[tuple[Connection, list[Finding]]]:
    """Connect all ranks as a training would, and let go of them at the end. Collective.

    What the settings force and cannot be had becomes a finding, and the ranks go on without. No
    word of it reaches the global world.

    The settings of rank 0 decide. Raises ``LaunchError``: the launcher, the MPI library and the
    world do not fit together.
    """
    ranks = find_world()
    # An error on its way out finds the hooks still there, and ends all ranks.
    hooks = FailureHooks(ranks, settings.log_dir) if ranks else None
    threads = torch.get_num_threads()
    obstacles: list[Finding] = []
    try:
        found = connect(ranks, settings)
    except (ConfigError, NodeMemoryError, LaunchError) as error:  # the last: no Horovod works
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
        ConfigError: ("plan", "leave HPCTRAIN_PLAN out, or measure anew"),
        NodeMemoryError: ("node memory", "set HPCTRAIN_SHARED_MEMORY=auto"),
        LaunchError: ("engine", "`hpctrain horovod build`, or HPCTRAIN_ENGINE=hpctrain"),
    }[type(error)]
    return Finding(name, "error", str(error), do)


def _in_sentences(found: Connection) -> list[str]:
    """Tell the plan: what it says, what it was chosen by, and what was measured."""
    rows = [f"{name} {text}" for name, text in found.plan.describe()]
    told = [f"{'; '.join(rows)}; chosen by {found.plan_origin}"]
    for what, where in (("rail", "between nodes"), ("tensors", "over all ranks")):
        table = found.plan.measurements(what)
        for size, *cells in table[1:]:
            pairs = zip(table[0][1:], cells, strict=True)
            times = ", ".join(f"{name} {cell}" for name, cell in pairs if cell)
            told.append(f"{size} {where}: {times}")
    return told
