"""Simulation of all-reduces: the time at which each rank of a machine has the result.

The messages are defined in ``hpctrain.cost.schedules``, which the ranks execute; all messages of a
round are simulated together. A message takes the latency of its link plus its bytes over the
bandwidth, and a send ends when the message has arrived. Ports are full duplex and send one message
after the other in each direction; messages of a round share the bandwidth of a common NIC, or of
the uplinks of a common leaf switch.
"""

import numpy as np

from hpctrain.core.errors import ConfigError
from hpctrain.cost.collectives import AllreduceSpec, around, between_nodes
from hpctrain.cost.machine import Machine
from hpctrain.cost.round_messages import Clocks, Times, members, phases
from hpctrain.cost.schedules import SCHEDULES


def allreduce_times(
    spec: AllreduceSpec, num_bytes: float, machine: Machine, start: Times | None = None
) -> Times:
    """Return the time at which each rank has the sum over all ranks.

    The times of codec and node memory, before and after the messages between nodes, are computed
    by ``collectives.around``. Ranks of a node synchronize before and after these messages.

    Args:
        spec: algorithm, rails and codec.
        num_bytes: length of the message.
        machine: ranks and links.
        start: time in seconds at which each rank starts the all-reduce; 0 by default.

    Returns:
        The time in seconds for each rank.

    Raises:
        ConfigError: ``start`` does not have a time for each rank.
    """
    rails, sent = between_nodes(machine, num_bytes, spec)
    before, after = (each.seconds(machine) for each in around(machine, num_bytes, spec))
    times = _synchronized(_started(start, machine), machine, rails) + before
    groups = members(machine, rails)
    if (size := groups.shape[1]) > 1 and sent:
        schedule = SCHEDULES[spec.algorithm]
        num_segments = schedule.num_segments(int(sent), size)
        piece_bytes = sent / (schedule.num_parts(size) * num_segments)
        turns = machine.turns(rails or machine.ranks_per_node)
        clocks = Clocks(times[groups].ravel(), piece_bytes, machine, turns)
        done = clocks.take(phases(schedule, num_segments, machine, rails))
        times[groups] = done.reshape(groups.shape)
    return _synchronized(times, machine, rails) + after


def _started(start: Times | None, machine: Machine) -> Times:
    if start is None:
        return np.zeros(machine.num_ranks)
    if len(start) != machine.num_ranks:
        raise ConfigError(
            f"start must have a time for each rank, got {len(start)} for {machine.num_ranks} ranks"
        )
    return np.asarray(start, dtype=np.float64)


def _synchronized(times: Times, machine: Machine, rails: int) -> Times:
    """With rails, replace each time by the latest time of its node; else return ``times``."""
    if not rails:
        return times
    return np.repeat(times.reshape(machine.nodes, -1).max(axis=1), machine.ranks_per_node)
