"""Checks of ``hpctrain doctor``: functions from facts to findings, without MPI and torch."""
