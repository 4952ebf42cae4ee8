"""Judgements of ``hpctrain doctor``, without MPI and torch: facts go in, findings come out."""
