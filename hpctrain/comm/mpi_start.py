"""The module ``MPI`` of mpi4py; its first import starts MPI, with the settings of this host."""

from hpctrain.cluster.libraries import settings_of_mpi

with settings_of_mpi():
    from mpi4py import MPI

__all__ = ["MPI"]
