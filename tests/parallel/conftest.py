"""Torch's group of all ranks over our backend, on one node and on nodes of two."""

from tests.process_group.conftest import nodes, started

__all__ = ["nodes", "started"]
