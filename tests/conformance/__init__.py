"""Horovod's own tests, run against hpctrain from a checkout of Horovod that the user names."""
