"""Collection of facts that need all ranks: the MPI world, and the speed of its links."""
