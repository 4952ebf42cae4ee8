"""Simulate a cluster on one machine: virtual nodes joined by links of a set rate and latency.

Tests and benchmarks use ``VirtualCluster``; ``python -m tests.cluster.vcluster`` is the command
line. The package needs root on Linux, ``iproute2`` and ``util-linux``. ``obstacle()`` returns the
reason if something is missing.
"""

from tests.cluster.vcluster.check import obstacle
from tests.cluster.vcluster.cluster import Finished, VirtualCluster

__all__ = ["Finished", "VirtualCluster", "obstacle"]
