"""Every check of one process, in the order people read them."""

from collections.abc import Callable

from hpctrain.core.finding import Finding
from hpctrain.doctor.host import (
    cores,
    directory,
    engines,
    gpus,
    job,
    library,
    memory,
    network,
    settings,
    versions,
)
from hpctrain.doctor.host.facts import Facts

CHECKS: tuple[Callable[[Facts], list[Finding]], ...] = (
    versions.check,
    library.check,
    engines.check,
    job.check_launcher,
    job.check,
    cores.check,
    cores.check_threads,
    gpus.check,
    memory.check,
    memory.check_node_memory,
    memory.check_leftovers,
    network.check,
    network.check_memlock,
    network.check_fork,
    network.check_copies,
    settings.check,
    directory.check,
)


def examine(facts: Facts) -> list[Finding]:
    """Return what all checks say about the facts; pure."""
    return [finding for check in CHECKS for finding in check(facts)]
