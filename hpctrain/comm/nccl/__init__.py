"""Sums on accelerators by NCCL, a library that torch includes."""
