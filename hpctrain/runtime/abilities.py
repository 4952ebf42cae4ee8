"""Abilities of this package, in Horovod's questions."""

import importlib.util
import sys

from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.runtime.world import current, is_initialized


def mpi_threads_supported() -> bool:
    """Say whether several threads of this process may call MPI at once.

    Raises:
        NotInitializedError: there is no world yet.
    """
    current()
    return calls_from_threads()


def mpi_enabled() -> bool:
    """Say whether there is a world, and MPI is loaded: a world of one goes without it."""
    return is_initialized() and "mpi4py.MPI" in sys.modules


def mpi_built() -> bool:
    """Say whether mpi4py is here, which finds the MPI library when it is loaded."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Say no: ranks talk through MPI and the memory of the node, and nothing is compiled in."""
    return False


gloo_built = ddl_built = ccl_built = cuda_built = rocm_built = gloo_enabled


def nccl_built() -> int:
    """Return 0: NCCL is not compiled in; ``HPCTRAIN_DEVICE_SUMS=nccl`` takes what torch ships."""
    return 0
