"""``barrier``, and ``join`` for ranks without further data."""

from hpctrain.collectives.operation import controller_of
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.core.errors import CommError, ConfigError
from hpctrain.negotiation.request import Kind, Request
from hpctrain.runtime import world
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet | None = global_process_set) -> None:
    """Wait until every rank of the process set has called this function. Collective.

    Raises:
        ConfigError: the process set is not registered, or this rank is not in it.
        RankLostError: another rank died or left.
    """
    controller_of(process_set).run(Request(Kind.BARRIER, None, ()))


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's
    """Contribute neutral values to operations of other ranks until all have joined. Collective.

    A rank with less data than others calls this function after its last step. The call applies to
    all process sets of this rank. A joined rank still counts as a rank: it contributes zeros to
    sums and averages, and no rows to gathers. If a ``DistributedOptimizer`` over all ranks uses
    ``set_num_samples``, a joined rank counts as a rank without samples. Every operation works
    except a broadcast from a joined rank. After this call, the weights of ranks that joined early
    are out of date: broadcast the weights of the returned rank.

    Args:
        device: device of Horovod's GPU buffers; ignored.

    Returns:
        The rank that joined last, the same on every rank. That rank has executed every step.

    Raises:
        ConfigError: the MPI library supports calls from one thread only, and there is a
            ``DistributedOptimizer`` or a process set; or this rank is inside a ``with`` block of
            local SGD or a similar method.
        MismatchError: the other ranks call ``step()`` of an optimizer with ``op=Adasum``; raised
            on every rank.
        RankLostError: another rank died or left.
    """
    here = world.current()
    check, controllers = here.step_checks.get(here.comm), here.sets.controllers()
    if (check is not None or len(controllers) > 1) and not calls_from_threads():
        raise ConfigError(
            "join() with a DistributedOptimizer or process sets must have an MPI library that "
            "supports calls from several threads (MPI_THREAD_MULTIPLE), but this one does not; "
            "give every rank equally many batches"
        )
    if here.presence is not None and (block := here.presence.blocks.innermost):
        raise ConfigError(
            f"join() must not be called in a block of a local method, but this rank is in a block "
            f"of {block}; call skip_step() for each step without a batch on this rank"
        )
    handles = [controller.start_join() for controller in controllers]
    try:
        while check is not None and check.take_part(here.comm):
            pass  # named operations of other ranks run concurrently
    except CommError as error:
        for controller in controllers:  # this rank cannot run further operations
            controller.break_off(
                f"join() has failed: {error}; end the program, or call hpctrain.shutdown() and "
                f"hpctrain.init() on every rank"
            )
        raise
    lasts: list[int] = [handle.wait()[0] for handle in handles]
    last = lasts[0]
    if check is not None:
        # The join of the last rank may arrive first, because other joins arrive during a step.
        steppers = check.last_to_step(here.comm)
        last = last if last in steppers else max(steppers)
    return last
