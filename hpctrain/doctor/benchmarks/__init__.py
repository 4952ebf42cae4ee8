"""Benchmarks of communication operations, similar to the OSU benchmarks and nccl-tests."""
