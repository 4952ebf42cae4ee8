"""Checks and benchmarks of a machine, and of the ranks of a launch."""
