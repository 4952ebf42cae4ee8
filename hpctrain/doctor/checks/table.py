"""Every check, in the order people read them."""

from collections.abc import Callable

from hpctrain.cluster.env import launched
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks import environment, job, network, node
from hpctrain.doctor.checks.check import merge
from hpctrain.doctor.checks.facts import Facts, WorldFacts

OF_PROCESS: tuple[Callable[[Facts], list[Finding]], ...] = (
    environment.check_versions,
    environment.check_library,
    environment.check_engines,
    job.check_launcher,
    job.check_job,
    node.check_gpus,
    node.check_room,
    node.check_ways,
    network.check_cards,
    network.check_copies,
    environment.check_settings,
    environment.check_directories,
)
"""Checks of one process and its machine."""

OF_WORLD: tuple[Callable[[WorldFacts], list[Finding]], ...] = (
    job.check_world,
    job.check_nodes,
    environment.check_equal_versions,
    environment.check_equal_settings,
    job.check_level,
    lambda world: node.check_masks(world.ranks),
    lambda world: node.check_threads(world.ranks),
    node.check_own_gpus,
    node.check_way,
    lambda world: list(world.obstacles),
    network.check_links,
    network.check_ways,
    network.check_clocks,
    job.tell_plan,
)
"""Checks of all ranks."""


def examine(facts: Facts) -> list[Finding]:
    """Return what the checks say about a process; pure."""
    found = [finding for judge in OF_PROCESS for finding in judge(facts)]
    if launched(facts.environ) is None:  # ranks are compared with each other
        found += [*node.check_masks([facts]), *node.check_threads([facts])]
    return found


def examine_all(world: WorldFacts, local: list[list[Finding]]) -> list[Finding]:
    """Return what the checks say about all ranks; pure.

    ``local`` is what each rank has found by itself.
    """
    merged = merge(local, [facts.host for facts in world.ranks])
    return [*merged, *(finding for judge in OF_WORLD for finding in judge(world))]
