"""Starting ranks: the only place that knows the options of mpirun, without torch and MPI."""
