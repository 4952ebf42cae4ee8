"""Collective functions on tensors, with the names and the semantics of Horovod."""
