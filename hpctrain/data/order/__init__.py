"""The order of the samples of an epoch, computed on demand."""
