"""Facts about the machine, the launcher and the MPI library; imports neither torch nor mpi4py."""
