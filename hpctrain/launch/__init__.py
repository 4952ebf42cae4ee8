"""Launch of ranks with mpirun or Slurm; imports neither torch nor MPI."""
