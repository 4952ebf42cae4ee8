"""The ranks wait for each other: ``barrier``."""

from hpctrain.collectives.operation_arguments import controller_of
from hpctrain.negotiation.request import Kind, Request
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet | None = global_process_set) -> None:
    """Return when every rank of the process set has called this. Collective.

    Raises:
        ConfigError: the process set is not registered, or this rank is not in it.
        RankLostError: another rank died or left.
    """
    controller_of(process_set).run(Request(Kind.BARRIER, None, ()))
