"""When replicas agree: the reducer and the distributed optimizer."""
