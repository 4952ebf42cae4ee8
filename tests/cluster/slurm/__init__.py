"""A real Slurm on one machine: controller, virtual nodes and jobs, private and ready in a second.

It needs root and the packages slurm-wlm, munge and libpmix-dev; ``slurm_obstacle()`` of
``vcluster.check`` says what is missing.
"""

from tests.cluster.slurm.cluster import SlurmCluster
from tests.cluster.slurm.job import Job

__all__ = ["Job", "SlurmCluster"]
