"""Tests of Horovod 0.28.1 that fail with Horovod itself, under today's torch."""

MUON = "the test makes every optimizer of torch with biases, which Muon refuses"

EXPECTED = {
    "test_torch.py::TorchTests::test_broadcast_state": MUON,
    "test_torch.py::TorchTests::test_broadcast_state_options": MUON,
    "test_torch.py::TorchTests::test_force_allreduce": MUON,
}
"""File and test, and the reason."""
