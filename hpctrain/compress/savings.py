"""The bytes that a codec spares between nodes, and the seconds, over the link that was probed."""

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.plan import Plan, expected_s
from hpctrain.compress.codec import Codec


class Savings(NamedTuple):
    """What travels between nodes in a step, by a codec and without one."""

    plain_bytes: int
    """Bytes that leave all nodes together in a step without a codec."""
    plain_s: float | None
    """Seconds that these take, of this rank; None where the link was not probed."""
    rail_s: float
    """Seconds of this rank for what the codec has made of them, in all steps so far."""


def savings_of(codec: Codec, buckets: Sequence[Bucket], comm: Communicator, plan: Plan) -> Savings:
    """Compare a codec with what the plan's measurements say of none. Not collective."""
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
