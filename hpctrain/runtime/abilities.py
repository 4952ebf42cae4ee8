"""Functions with Horovod's names that report the features of this package."""

import importlib.util
import sys

from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.runtime.world import current, is_initialized


def mpi_threads_supported() -> bool:
    """Return True if several threads of this process may call MPI concurrently.

    Raises:
        NotInitializedError: ``init`` was not called.
    """
    current()
    return calls_from_threads()


def mpi_enabled() -> bool:
    """Return True if ``init`` was called and MPI is loaded; one rank alone needs no MPI."""
    return is_initialized() and "mpi4py.MPI" in sys.modules


def mpi_built() -> bool:
    """Return True if mpi4py is installed; mpi4py finds the MPI library at run time."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return False: ranks communicate through MPI and shared memory, not through Gloo."""
    return False


gloo_built = ddl_built = ccl_built = cuda_built = rocm_built = gloo_enabled


def nccl_built() -> int:
    """Return 0: NCCL is not compiled in; ``HPCTRAIN_DEVICE_SUMS=nccl`` uses torch's NCCL."""
    return 0
