"""Threads that the MPI library allows beside the one that trains."""

import sys


def calls_from_threads() -> bool:
    """Return whether several threads of this process may call MPI at once. Not collective.

    A process that has not loaded MPI, such as a world of one, may.
    """
    if "mpi4py.MPI" not in sys.modules:
        return True
    from mpi4py import MPI  # noqa: PLC0415 - a world of one needs no MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE
