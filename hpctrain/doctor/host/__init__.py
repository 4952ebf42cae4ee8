"""Checks of ``hpctrain doctor`` in one process, without MPI and torch.

``gather`` collects facts, every other module judges some of them: facts go in, findings come out.
"""
