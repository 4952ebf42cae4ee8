"""Collective functions on tensors with Horovod's names and meanings, one file each."""
