"""Other methods that sum a tensor over all ranks: MPI, gloo, Horovod and DeepSpeed.

Each function takes a tensor, prepares the operation, and returns a function that replaces the
tensor by its sum over all ranks. Only the returned function is timed.
"""

import importlib
import os
import socket
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

Peer = Callable[[Tensor], Callable[[], object]]

_TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}


def library(comm: MPI.Intracomm) -> Peer:
    """Return a blocking call of MPI_Allreduce in place over ``comm``."""

    def prepare(tensor: Tensor) -> Callable[[], object]:
        buffer = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return partial(comm.Allreduce, MPI.IN_PLACE, [buffer, _TYPES[tensor.dtype]])

    return prepare


def start_gloo() -> Peer:
    """Create a process group of torch over gloo; ``stop_gloo`` ends the group. Collective."""
    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = world.bcast(probe.getsockname()[1])
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    return lambda tensor: partial(dist.all_reduce, tensor)


def stop_gloo() -> None:
    """End the process group. Collective."""
    dist.destroy_process_group()


def start_horovod() -> Peer:
    """Start Horovod over the world of MPI. Collective."""
    horovod = importlib.import_module("horovod.torch")
    horovod.init(comm=MPI.COMM_WORLD)
    return lambda tensor: partial(
        horovod.allreduce_, tensor, op=horovod.Sum, name=f"sum of {tensor.numel()}"
    )


def start_deepspeed() -> Peer:
    """Start DeepSpeed, whose all-reduce for inference uses shared memory. Collective."""
    deepspeed = importlib.import_module("deepspeed.comm")
    os.environ["LOCAL_SIZE"] = str(MPI.COMM_WORLD.size)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return lambda tensor: partial(deepspeed.inference_all_reduce, tensor)
