"""All ranks tell each other what they see, and measure what is between them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.cluster import env
from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.doctor.host.merge import merge
from hpctrain.doctor.ranks import (
    clocks,
    devices,
    network,
    plans,
    rank_cores,
    rank_layout,
    speed,
    version_check,
)
from hpctrain.doctor.ranks.connection import connected
from hpctrain.doctor.ranks.links import Link, measure, rounds
from hpctrain.doctor.ranks.network import Carried
from hpctrain.doctor.ranks.report import RankReport, look

FEWEST_ROUNDS = 3
"""A node is compared with so many others at least; two join all nodes by a way."""
MOST_DOUBTS, DOUBTED, PAUSE_S = 4, 4, 0.1
"""So many slow links are measured again, each alone, so often, and after so many seconds: what
else hosts were busy with has passed by then, and a bad cable has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mine:
    """What each rank tells all others."""

    report: RankReport
    notes: tuple[str, ...]
    local: Sequence[Finding]


def compare(local: Sequence[Finding], seconds: float) -> list[Finding]:
    """Connect all ranks, gather their reports and judge them. Collective.

    Args:
        local: what this rank has found on its host; that of all ranks is merged.
        seconds: what the measurements between many nodes may take, about.

    Returns:
        The same on every rank.

    Raises:
        LaunchError: the launcher, the MPI library and the world do not fit together.
    """
    settings, refusal = Settings(), ""
    try:
        settings = Settings.from_env()
    except ConfigError as error:
        refusal = str(error)
    with connected(settings) as (found, obstacles):
        comm, topology = found.comm, found.topology
        report = look(refusal, with_mpi=comm.size > 1)
        told = comm.allgather_object(_Mine(report=report, notes=found.notes, local=local))
        reports = [rank.report for rank in told]
        launched, settings = comm.broadcast_object((env.launched(), settings))
        mpi = reports[0].versions.get("MPI library", "no MPI")
        findings = [
            *merge([rank.local for rank in told], [report.host for report in reports]),
            *rank_layout.check_world(launched, topology, mpi),
            *rank_layout.check_nodes(topology),
            *rank_layout.check_hosts(reports),
            *version_check.check_versions(reports),
            *version_check.check_settings(reports),
            *rank_layout.check_level(reports, found.plan.overlap),
            *rank_cores.check_masks(reports),
            *rank_cores.check_threads(reports),
            *devices.check(reports, topology),
            *plans.check_memory(found, told[0].notes, settings),
            *obstacles,
            *_messages(comm, topology, reports, seconds),
            *plans.describe(found),
        ]
        return comm.broadcast_object(findings)  # some speak of rank 0's own: it tells all


def _messages(
    comm: Communicator, topology: Topology, reports: Sequence[RankReport], seconds: float
) -> list[Finding]:
    """Measure inside the nodes and between them."""
    within = [(ranks[0], ranks[1]) for ranks in topology.nodes if len(ranks) > 1]
    inside = measure(comm, within)
    before = network.interface_bytes(), network.card_bytes()
    links = _between(comm, topology, seconds)
    after = network.interface_bytes(), network.card_bytes()
    report = reports[comm.rank]
    mine = Carried(
        host=topology.hosts[topology.node],
        sent_bytes=sum(link.sent_bytes for link in links if comm.rank in link.ranks),
        by_interface=network.difference(before[0], after[0]),
        by_card=network.difference(before[1], after[1]),
        fast_cards=report.fast_cards,
    )
    told = comm.allgather_object(mine if topology.local_rank == 0 else None)
    return [
        *speed.inside(inside),
        *speed.check(links, topology),
        *network.check([one for one in told if one is not None]),
        *clocks.check(links, topology),
    ]


def _between(comm: Communicator, topology: Topology, seconds: float) -> list[Link]:
    """Measure pairs of nodes as long as there is time, a few rounds at least; doubts again."""
    links: list[Link] = []
    end = time.monotonic() + seconds
    for number, pairs in enumerate(rounds([ranks[0] for ranks in topology.nodes]), start=1):
        links += measure(comm, pairs)
        if not comm.broadcast_object(number < FEWEST_ROUNDS or time.monotonic() < end):
            break
    for _ in range(DOUBTED):
        doubts = speed.slow(links)[:MOST_DOUBTS]
        if doubts:
            time.sleep(PAUSE_S)
        for doubt in doubts:
            again = measure(comm, [doubt.ranks])[0]
            links[links.index(doubt)] = doubt.with_best_of(again)
    return links
