"""Run Horovod's own tests against hpctrain; the tests come from a checkout of Horovod."""
