"""A cluster on one machine: virtual nodes joined by links of a set rate and latency.

``VirtualCluster`` is for tests and benchmarks; ``python -m tests.cluster.vcluster`` for people.
It needs root on Linux, ``iproute2`` and ``util-linux``; ``obstacle()`` says what is missing.
"""

from tests.cluster.vcluster.check import obstacle
from tests.cluster.vcluster.cluster import Finished, VirtualCluster

__all__ = ["Finished", "VirtualCluster", "obstacle"]
