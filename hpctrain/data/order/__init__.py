"""The order of the samples of an epoch, computed where it is needed."""
