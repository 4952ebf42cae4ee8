"""Provide the worlds of ``tests/gradients``."""

from tests.gradients.conftest import hvd, hvd_nodes, last, per_node, worlds

__all__ = ["hvd", "hvd_nodes", "last", "per_node", "worlds"]
