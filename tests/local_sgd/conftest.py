"""The worlds of ``tests/gradients``."""

from tests.gradients.conftest import hvd, hvd_nodes, overlap

__all__ = ["hvd", "hvd_nodes", "overlap"]
