"""Tests of Horovod 0.28.1 that fail, and why."""

_MUON = "the test gives biases to every optimizer of torch, and Muon takes matrices only"
_JOIN = "the test wants an error: Horovod's join() has no such collective, hpctrain's has all"

BY_THEMSELVES = {
    "test_torch.py::TorchTests::test_broadcast_state": _MUON,
    "test_torch.py::TorchTests::test_broadcast_state_options": _MUON,
    "test_torch.py::TorchTests::test_force_allreduce": _MUON,
}
"""File and test, and the reason. With Horovod itself these fail too, under today's torch."""

WITH_HPCTRAIN = BY_THEMSELVES | {
    "test_torch.py::TorchTests::test_horovod_join_allgather": _JOIN,
    "test_torch.py::TorchTests::test_horovod_join_broadcast": _JOIN,
}
"""And what differs on purpose."""
