"""The checks of ``hpctrain doctor`` that need all ranks: what MPI made, and how fast it is."""
