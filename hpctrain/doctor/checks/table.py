"""Table of all checks, in the order of the output."""

from collections.abc import Callable

from hpctrain.cluster.env import launched
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks import environment, gpu_network, gpus, job, network, node
from hpctrain.doctor.checks.check import Found, merge, named
from hpctrain.doctor.checks.facts import Facts, WorldFacts

OF_PROCESS: tuple[tuple[str, Callable[[Facts], Found]], ...] = (
    ("versions", environment.check_versions),
    ("MPI library", environment.check_library),
    ("engines", environment.check_engines),
    ("launcher", job.check_launcher),
    ("job", job.check_job),
    ("GPUs", gpus.check_gpus),
    ("GPU links", gpus.check_gpu_links),
    ("GPU network", gpu_network.check_gpu_network),
    ("GPU places", gpu_network.check_gpu_places),
    ("srun --mpi", gpu_network.check_srun_type),
    ("caches", gpu_network.check_caches),
    ("core dumps", gpu_network.check_limits),
    ("stripes", gpu_network.check_stripes),
    ("load", node.check_load),
    ("memory", node.check_room),
    ("node memory", node.check_shared_memory),
    ("limits", node.check_limits),
    ("network adapters", network.check_adapters),
    ("copies between ranks", network.check_copies),
    ("settings", environment.check_settings),
    ("directory", environment.check_directories),
)
"""Checks of one process and its machine."""

OF_WORLD: tuple[tuple[str, Callable[[WorldFacts], Found]], ...] = (
    ("world", job.check_world),
    ("ranks per node", job.check_nodes),
    ("versions", environment.check_equal_versions),
    ("settings", environment.check_equal_settings),
    ("MPI threads", job.check_level),
    ("cores", lambda world: node.check_masks(world.ranks)),
    ("threads", lambda world: node.check_threads(world.ranks)),
    ("GPUs", gpus.check_own_gpus),
    ("NCCL", gpus.check_nccl),
    ("node memory", node.check_node_memory),
    ("", lambda world: world.obstacles),
    ("links", network.check_links),
    ("network", network.check_interfaces),
    ("clocks", network.check_clocks),
    ("plan", job.report_plan),
)
"""Checks of all ranks."""


def examine(facts: Facts) -> list[Finding]:
    """Return the findings of all checks of one process."""
    found = [each for name, judge in OF_PROCESS for each in named(name, judge(facts))]
    if launched(facts.environ) is None:  # ``OF_WORLD`` checks the ranks of a launch
        found += named("cores", node.check_masks([facts]))
        found += named("threads", node.check_threads([facts]))
    return found


def examine_all(world: WorldFacts, local: list[list[Finding]]) -> list[Finding]:
    """Return the findings of all checks of a launch.

    ``local[rank]`` contains the findings about the process of ``rank``.
    """
    merged = merge(local, [facts.host for facts in world.ranks])
    found = (each for name, judge in OF_WORLD for each in named(name, judge(world)))
    return [*merged, *found]
