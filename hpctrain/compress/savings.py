"""Bytes and seconds that a codec saves between nodes, from measurements of the link."""

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.plan import Plan, expected_s
from hpctrain.compress.codec import Codec


class Savings(NamedTuple):
    """Cost of the communication between nodes, with and without a codec."""

    plain_bytes: int
    """Bytes that all nodes together send in a step without a codec."""
    plain_s: float | None
    """Seconds per step of this rank without a codec; None if the link was not measured."""
    rail_s: float
    """Seconds of this rank with the codec, summed over all steps."""


def savings_of(codec: Codec, buckets: Sequence[Bucket], comm: Communicator, plan: Plan) -> Savings:
    """Compare a codec with the time without one, from measurements of the plan. Local."""
    sizes = [bucket.flat.nbytes for bucket in buckets]
    num_nodes = 1 if comm.internode is None else comm.internode.size
    if num_nodes == 1:
        return Savings(0, 0.0, codec.rail_s)
    times: dict[int, float] = {}
    for each in plan.measured:
        if each.what == "rail":
            fastest = min(each.seconds, times.get(each.num_bytes, each.seconds))
            times[each.num_bytes] = fastest
    least = min(times.values(), default=0.0)
    parts = [size // comm.num_rails for size in sizes]
    plain_s = sum(max(expected_s(times, part), least) for part in parts) if times else None
    return Savings(2 * (num_nodes - 1) * sum(sizes), plain_s, codec.rail_s)
