"""A program for virtual nodes: sums whose results are known, and what they cost.

Started by ``test_network.py`` on ranks; prints ``summing`` when the loop begins and one line of
JSON at its end, both on rank 0.
"""

import argparse
import hashlib
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

SIZES = (1, 1000, 70_001, 300_000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8)


def values(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Give numbers of one rank whose sums are exact in every dtype."""
    return (torch.arange(numel) % 5 + rank).to(dtype)


def total(numel: int, size: int, dtype: torch.dtype) -> Tensor:
    """Compute the sum of ``values`` over all ranks, serially."""
    return ((torch.arange(numel) % 5) * size + sum(range(size))).to(dtype)


def check_sums(comm: Communicator) -> None:
    """Sum buckets and ordinary tensors of all sizes and dtypes."""
    for dtype in DTYPES:
        for numel in SIZES:
            tensor = values(numel, comm.rank, dtype)
            comm.allreduce_(tensor).wait()
            assert torch.equal(tensor, total(numel, comm.size, dtype)), (dtype, numel)
            bucket = comm.new_bucket(numel, dtype)
            bucket.flat.copy_(values(numel, comm.rank, dtype))
            comm.allreduce_(bucket).wait()
            assert torch.equal(bucket.flat, total(numel, comm.size, dtype)), (dtype, numel)


def check_bits(comm: Communicator) -> None:
    """Sum numbers whose sum is rounded: it must be close, and the same bits on every rank."""
    inputs = [torch.randn(70_001, generator=torch.Generator().manual_seed(r)) for r in range(99)]
    bucket = comm.new_bucket(70_001, torch.float32)
    bucket.flat.copy_(inputs[comm.rank])
    comm.allreduce_(bucket).wait()
    expected = torch.stack(inputs[: comm.size]).double().sum(0).float()
    torch.testing.assert_close(bucket.flat, expected, rtol=1e-5, atol=1e-5)
    bits = hashlib.sha256(bucket.flat.numpy().tobytes()).hexdigest()
    assert len(set(comm.allgather_object(bits))) == 1


def sent_bytes() -> int:
    """Return how many bytes have left this node by its network card."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def run_loop(options: argparse.Namespace, comm: Communicator) -> dict[str, object]:
    """Sum one bucket many times; return what each rank saw of it."""
    numel = options.kib * 1024 // 4
    bucket = comm.new_bucket(numel, torch.float32)
    expected = total(numel, comm.size, torch.float32)
    host = socket.gethostname()
    comm.barrier()
    if comm.rank == 0:
        sys.stdout.write("summing\n")
        sys.stdout.flush()
    cpu_s, began, before = time.process_time(), time.monotonic(), sent_bytes()
    for _ in range(options.steps):
        bucket.flat.copy_(values(numel, comm.rank, torch.float32))
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
    parser.add_argument("--all-sums", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kib", type=int, default=256)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--late-node", default="")
    parser.add_argument("--late-s", type=float, default=0.0)
    options = parser.parse_args()

    hpctrain.init()
    world = current()
    if options.all_sums:
        check_sums(world.comm)
        check_bits(world.comm)
    ranks = world.comm.allgather_object(run_loop(options, world.comm))
    if world.comm.rank == 0:
        topology = world.topology
        facts = {"ranks": ranks, "nodes": topology.nodes, "hosts": topology.hosts}
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
