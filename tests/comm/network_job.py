"""Sum buckets with known results on virtual nodes, and measure the cost.

``test_network.py`` starts this program on ranks. Rank 0 prints ``summing`` when the loop begins
and one line of JSON at its end.
"""

import argparse
import json
import socket
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import hpctrain
from hpctrain.comm.communicator import Communicator
from hpctrain.runtime.world import current


def values(numel: int, rank: int) -> Tensor:
    """Return the values of one rank; their sums are exact."""
    return (torch.arange(numel) % 5 + rank).float()


def total(numel: int, size: int) -> Tensor:
    """Compute the sum of ``values`` over all ranks, serially."""
    return ((torch.arange(numel) % 5) * size + sum(range(size))).float()


def sent_bytes() -> int:
    """Return the number of bytes that this node has sent by its network adapter."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def run_loop(options: argparse.Namespace, comm: Communicator) -> dict[str, object]:
    """Sum one bucket many times; return the measurements of each rank."""
    numel = options.kib * 1024 // 4
    bucket = comm.new_bucket(numel, torch.float32)
    expected = total(numel, comm.size)
    host = socket.gethostname()
    comm.barrier()
    if comm.rank == 0:
        sys.stdout.write("summing\n")
        sys.stdout.flush()
    cpu_s, began, before = time.process_time(), time.monotonic(), sent_bytes()
    for _ in range(options.steps):
        bucket.flat.copy_(values(numel, comm.rank))
        time.sleep(options.late_s if host == options.late_node else options.pause_s)
        comm.allreduce_(bucket).wait()
        assert torch.equal(bucket.flat, expected)
    seconds = time.monotonic() - began
    cpu_s = time.process_time() - cpu_s
    comm.barrier()
    return {
        "host": host,
        "seconds": seconds,
        "cores": cpu_s / seconds,
        "sent_bytes": sent_bytes() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kib", type=int, default=256)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--late-node", default="")
    parser.add_argument("--late-s", type=float, default=0.0)
    options = parser.parse_args()

    hpctrain.init()
    world = current()
    ranks = world.comm.allgather_object(run_loop(options, world.comm))
    if world.comm.rank == 0:
        topology = world.topology
        facts = {"ranks": ranks, "nodes": topology.nodes, "hosts": topology.hosts}
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
