"""Every check, in the order people read them."""

from collections.abc import Callable

from hpctrain.cluster.env import launched
from hpctrain.core.finding import Finding
from hpctrain.doctor.checks import (
    cores,
    directory,
    gpus,
    job,
    library,
    links,
    memory,
    network,
    settings,
    versions,
)
from hpctrain.doctor.checks.check import merge
from hpctrain.doctor.checks.facts import Facts, WorldFacts

OF_PROCESS: tuple[Callable[[Facts], list[Finding]], ...] = (
    versions.check_versions,
    library.check_library,
    library.check_engines,
    job.check_launcher,
    job.check_job,
    gpus.check_gpus,
    memory.check_room,
    memory.check_ways,
    network.check_cards,
    network.check_copies,
    settings.check_settings,
    directory.check_directories,
)
"""Checks of one process and its machine."""

OF_WORLD: tuple[Callable[[WorldFacts], list[Finding]], ...] = (
    job.check_world,
    job.check_nodes,
    versions.check_equal_versions,
    settings.check_equal_settings,
    job.check_level,
    lambda world: cores.check_masks(world.ranks),
    lambda world: cores.check_threads(world.ranks),
    gpus.check_own_gpus,
    memory.check_way,
    lambda world: list(world.obstacles),
    links.check_links,
    network.check_ways,
    links.check_clocks,
    job.tell_plan,
)
"""Checks of all ranks."""


def examine(facts: Facts) -> list[Finding]:
    """Return what the checks say about a process; pure."""
    found = [finding for judge in OF_PROCESS for finding in judge(facts)]
    if launched(facts.environ) is None:  # ranks are compared with each other
        found += [*cores.check_masks([facts]), *cores.check_threads([facts])]
    return found


def examine_all(world: WorldFacts, local: list[list[Finding]]) -> list[Finding]:
    """Return what the checks say about all ranks; pure.

    ``local`` is what each rank has found by itself.
    """
    merged = merge(local, [facts.host for facts in world.ranks])
    return [*merged, *(finding for judge in OF_WORLD for finding in judge(world))]
