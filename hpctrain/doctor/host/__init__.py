"""Collection of facts about one process and its machine, without MPI and torch.

``gather`` returns the facts, which are the input of ``hpctrain.doctor.checks``.
"""
