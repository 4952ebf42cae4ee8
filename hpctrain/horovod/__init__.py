"""Horovod's other doors: its module names, its elastic training."""
