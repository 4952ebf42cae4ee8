"""Run a real Slurm on one machine: a private controller, virtual nodes and jobs.

The package needs root and the Debian packages slurm-wlm, munge and libpmix-dev.
``slurm_obstacle()`` of ``vcluster.check`` returns the reason if something is missing.
"""

from tests.cluster.slurm.cluster import SlurmCluster
from tests.cluster.slurm.job import Job

__all__ = ["Job", "SlurmCluster"]
