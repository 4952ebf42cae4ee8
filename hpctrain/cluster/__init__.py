"""Facts about the machine, in one frozen value; nothing here imports torch or mpi4py."""
