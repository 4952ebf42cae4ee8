"""Horovod's interfaces: its module names and its elastic training."""
