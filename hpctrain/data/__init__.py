"""Training data in sharded HDF5."""
