"""NCCL, the library that torch ships: sums over ranks on the accelerators themselves."""
