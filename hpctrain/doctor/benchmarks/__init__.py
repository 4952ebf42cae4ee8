"""Benchmarks of the operations of the world, in the manner of OSU's and nccl-tests."""
