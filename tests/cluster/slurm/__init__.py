"""A real Slurm on one machine: controller, virtual nodes and jobs, private and ready in a second.

``SlurmCluster`` is for tests; ``python -m tests.cluster.slurm`` for people. It needs root and the
packages slurm-wlm, munge and libpmix-dev; ``obstacle()`` says what is missing.
"""

from tests.cluster.slurm.check import obstacle
from tests.cluster.slurm.cluster import SlurmCluster
from tests.cluster.slurm.job import Job

__all__ = ["Job", "SlurmCluster", "obstacle"]
