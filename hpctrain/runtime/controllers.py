"""Makes the controllers of a world: what all of them have in common, and what is a set's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.plan import Plan
from hpctrain.core.config import Settings
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.stall import Stalls, StallWatch
from hpctrain.negotiation.stall_report import SetMember
from hpctrain.negotiation.timeline import Timelines
from hpctrain.negotiation.whereabouts import LastCall

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Controllers:
    """What the controllers of a world have in common."""

    topology: Topology
    plan: Plan
    settings: Settings
    timelines: Timelines
    last_call: LastCall
    end: Callable[[int], object] | None
    """Ends all ranks with an exit code; None in a world of one."""

    def make(self, comm: Communicator, ranks: Sequence[int]) -> Controller:
        """Make the controller of a process set. Collective over ``comm``.

        Args:
            comm: its ranks; nobody else may use it, the controller closes it.
            ranks: their numbers in the world.
        """
        settings, plan = self.settings, self.plan
        nodes = zip(self.topology.nodes, self.topology.hosts, strict=True)
        hosts = {rank: host for members, host in nodes for rank in members}
        members = [SetMember(rank, hosts[rank]) for rank in ranks]
        watch = StallWatch(settings, comm.rank, members, self.last_call)
        return Controller(
            comm,
            fusion_bytes=_first(settings.fusion_bytes, plan.fusion_bytes),
            cycle_s=_first(settings.cycle_s, plan.cycle_s),
            timeout_s=settings.timeout,
            timelines=self.timelines,
            stalls=Stalls(watch, self.last_call, self.end),
        )


def _first(setting: T | None, of_plan: T) -> T:
    return of_plan if setting is None else setting
