"""One rank of a job of ``bench_allreduce.py``: it times the methods of one peer on request.

    hpctrain launch -n 2 -- python perf/allreduce_job.py PEER ADDRESS

The rank connects to the socket at ADDRESS and sleeps until it receives a request, so that idle
jobs leave the cores to the job that is measured. Requests and replies are lines of JSON.
"""

import json
import platform
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
from measure import interleave
from mpi4py import MPI
from peers import Peer, library, start_deepspeed, start_gloo, start_horovod
from torch import Tensor

Method = Callable[[int], tuple[Tensor, Callable[[], object]]]
"""For a number of float32 elements, returns values and a function that sums them over ranks."""

STARTS: dict[str, Callable[[], Peer]] = {
    **{mpi: lambda: library(MPI.COMM_WORLD) for mpi in ("Open MPI", "MPICH", "Intel MPI")},
    "gloo": start_gloo,
    "Horovod": start_horovod,
    "DeepSpeed": start_deepspeed,
}


def methods_of(peer: str) -> dict[str, Method]:
    """Start a peer, or hpctrain, and return its methods by name. Collective."""
    if peer == "hpctrain":
        return ours()
    call = STARTS[peer]()

    def prepare(numel: int) -> tuple[Tensor, Callable[[], object]]:
        values = torch.empty(numel)
        return values, call(values)

    return {peer: prepare}


def ours() -> dict[str, Method]:
    """Return the two methods of hpctrain: in a bucket in node memory, and in a tensor."""
    import hpctrain  # noqa: PLC0415 - not in the process of a peer
    from hpctrain.runtime.world import current  # noqa: PLC0415

    hpctrain.init()
    comm = current().comm

    def bucket(numel: int) -> tuple[Tensor, Callable[[], object]]:
        made = comm.new_bucket(numel, torch.float32)
        return made.flat, lambda: comm.allreduce_(made).wait()

    def tensor(numel: int) -> tuple[Tensor, Callable[[], object]]:
        values = torch.empty(numel)
        return values, lambda: comm.allreduce_(values).wait()

    return {"bucket": bucket, "tensor": tensor}


def measure(method: Method, num_bytes: int, repetitions: int) -> list[float]:
    """Return the seconds of each call on the slowest rank; stop if a sum is wrong."""
    world = MPI.COMM_WORLD
    values, call = method(num_bytes // 4)

    def write() -> None:
        values.fill_(world.rank + 1)

    times = interleave({"": call}, rounds=1, repetitions=repetitions, prepare=write, warm_up=3)[""]
    write()
    call()
    if not bool((values == world.size * (world.size + 1) / 2).all()):
        raise SystemExit("the sum is wrong")
    return times


def version_of(peer: str) -> str:
    """Return the version of the software that a job measures."""
    package = {"Horovod": "horovod", "DeepSpeed": "deepspeed"}.get(peer)
    if package:
        return str(__import__(package).__version__)
    if "MPI" in peer:
        line = MPI.Get_library_version().splitlines()[0].split(",")[0]
        return " ".join(line.strip("\x00").split())
    return f"torch {torch.__version__}, Python {platform.python_version()}"


def main() -> None:
    """Serve the requests of ``bench_allreduce.py`` until it closes the connection."""
    peer, address = sys.argv[1:]
    torch.set_num_threads(1)
    methods = methods_of(peer)
    control = socket.socket(socket.AF_UNIX)
    control.connect(address)
    stream = control.makefile("rw")

    def reply(*what: object) -> None:
        print(json.dumps(what), file=stream, flush=True)

    reply(MPI.COMM_WORLD.rank, list(methods), version_of(peer))
    with suppress(BrokenPipeError):
        for line in stream:
            name, num_bytes, repetitions = json.loads(line)
            reply(measure(methods[name], num_bytes, repetitions))


if __name__ == "__main__":
    main()
