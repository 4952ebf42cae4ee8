"""Fixtures of ``tests/gradients`` that create worlds."""

from tests.gradients.conftest import hvd, hvd_nodes, last, per_node, worlds

__all__ = ["hvd", "hvd_nodes", "last", "per_node", "worlds"]
