"""Checks of ``hpctrain doctor``: functions of facts that return findings; need no MPI or torch."""
