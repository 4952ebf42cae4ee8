"""Checks of ``hpctrain doctor`` in one process, without MPI and torch.

``gather`` collects the facts that ``hpctrain.doctor.checks`` judges.
"""
