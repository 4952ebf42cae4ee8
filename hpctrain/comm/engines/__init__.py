"""Engines of others below the same protocol: Horovod."""
