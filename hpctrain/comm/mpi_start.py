"""The module ``MPI`` of mpi4py; its first import starts MPI, with the settings of this host."""

import atexit

from hpctrain.cluster.libraries import settings_of_mpi
from hpctrain.cluster.process import LEAVING, rename

# The last of our handlers at exit: mpi4py calls MPI_Finalize when all handlers have run.
atexit.register(rename, LEAVING)
with settings_of_mpi():
    from mpi4py import MPI

__all__ = ["MPI"]
