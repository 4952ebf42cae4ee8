"""One job of ``bench_network.py``, on the ranks of a cluster: all methods to sum, interleaved.

Ranks are numbered node by node. The flat baseline also runs over a communicator in which the ranks
are numbered round robin over the nodes, as many launchers do by default. Horovod has separate jobs
in ``bench_engines.py``, because its threads communicate a thousand times per second.
"""

import argparse
import json
import socket
import time
from pathlib import Path

import torch
from measure import interleave, machine, median
from mpi4py import MPI
from peers import Peer, library, start_gloo, stop_gloo

import hpctrain as hvd
from hpctrain.core.units import KIB
from hpctrain.runtime.world import current

COUNTED_CALLS = 2
SETTLE_S = 0.2
"""Wait until the node has sent late acknowledgements."""


def cyclic(world: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator with ranks numbered round robin over the nodes. Collective."""
    hosts = world.allgather(socket.gethostname())
    before_me = hosts[: world.rank].count(hosts[world.rank])
    return world.Split(0, before_me * world.size + world.rank)


def sent_bytes() -> int:
    """Return the number of bytes that this node has sent by ``eth0``."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        card, _, counters = line.partition(":")
        if card.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError("a node must have eth0, but this node has none; use a virtual cluster")


def bytes_out(work, num_bytes: int) -> float:
    """Return the bytes that the busiest node sends in a call, per message byte. Collective."""
    world = MPI.COMM_WORLD
    work()
    counts = []
    for calls in (COUNTED_CALLS, 0):  # the second pass counts the bytes of the barriers
        world.Barrier()
        time.sleep(SETTLE_S)
        world.Barrier()
        before = sent_bytes()
        for _ in range(calls):
            work()
        world.Barrier()
        time.sleep(SETTLE_S)
        counts.append(sent_bytes() - before)
        world.Barrier()
    return world.allreduce(counts[0] - counts[1], MPI.MAX) / COUNTED_CALLS / num_bytes


def measure_size(num_bytes: int, rounds: int, peers: dict[str, Peer]) -> dict[str, object]:
    """Time and count all methods for one message size, and check sums. Collective."""
    comm = current().comm
    numel = num_bytes // 4
    bucket = comm.new_bucket(numel, torch.float32)
    tensor, named, plain = (torch.zeros(numel) for _ in range(3))
    ours = {"bucket": bucket.flat, "tensor": tensor, "named": named}

    def write() -> None:
        for values in (*ours.values(), plain):
            values.fill_(comm.rank + 1)

    variants = {
        "bucket": lambda: comm.allreduce_(bucket).wait(),
        "tensor": lambda: comm.allreduce_(tensor).wait(),
        "named": lambda: hvd.allreduce_(named, name=f"sum of {numel}", op=hvd.Sum),
        **{name: peer(plain) for name, peer in peers.items()},
    }
    for name, work in variants.items():
        values = ours.get(name, plain)
        write()
        work()
        exact = bool((values == comm.size * (comm.size + 1) / 2).all())
        comm.agree(exact, f"the sum by {name} is wrong")
    repetitions = 3 if num_bytes <= 256 * KIB else 1
    seconds = interleave(variants, rounds=rounds, repetitions=repetitions, prepare=write)
    return {
        "bytes": num_bytes,
        "seconds": {name: median(times) for name, times in seconds.items()},
        "all seconds": seconds,
        "bytes out": {name: bytes_out(work, num_bytes) for name, work in variants.items()},
    }


def main() -> None:
    """Measure all sizes and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of the messages")
    parser.add_argument("--rounds", type=int, help="rounds of each method")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    peers = {
        "MPI, block order": library(MPI.COMM_WORLD.Dup()),
        "MPI, cyclic order": library(cyclic(MPI.COMM_WORLD)),
        "gloo": start_gloo(),
    }
    rows = [measure_size(size, options.rounds, peers) for size in options.sizes]
    stop_gloo()
    if hvd.rank() == 0:
        plan = dict(current().plan.describe())
        text = json.dumps({"machine": machine(), "plan": plan, "rows": rows}, default=str)
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
