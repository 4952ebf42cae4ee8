"""Interfaces of Horovod: its module names, and elastic training."""
