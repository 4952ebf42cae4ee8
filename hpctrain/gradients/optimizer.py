"""``DistributedOptimizer``: any torch optimizer, stepping on gradients averaged over all ranks."""

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.compress.codec import Compressor
from hpctrain.compress.half import Compression, codec_for
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.adasum_optimizer import (
    AdasumMethods,
    AdasumStep,
    begin_step,
    combine_steps,
)
from hpctrain.gradients.bucket_reducer import Reducer
from hpctrain.gradients.distributed_methods import (
    DistributedMethods,
    after_step,
    before_step,
    check_passes,
)
from hpctrain.gradients.gradient_buckets import Grouping, Groups
from hpctrain.gradients.parameter_names import named, names_of
from hpctrain.gradients.reduction import Reduction, ReductionOptions
from hpctrain.gradients.step_header import StepHeader
from hpctrain.negotiation.request import Adasum, Average, ReduceOp, Sum
from hpctrain.runtime import world
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(  # noqa: N802, PLR0913, PLR0917 - Horovod's name and arguments
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Compressor | None = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    process_set: ProcessSet | None = global_process_set,
) -> Any:
    """Make ``optimizer`` step on gradients that are averaged over all ranks.

    The optimizer is changed in place and returned: schedulers, scalers and hooks that know it go
    on to work, and ``isinstance`` stays true. When ``backward()`` returns, every ``.grad`` is the
    average, so clipping and unscaling see the truth. It lies in a buffer that the next step uses
    again: clone what you keep. In a world of one, and outside ``process_set``, nothing happens.
    Collective over the process set, as are ``backward()`` and ``step()`` from then on. Several of
    them may share one backward, if all ranks' hooks fire in the same order.

    Args:
        optimizer: any torch optimizer, already holding the parameters.
        named_parameters: names for messages: of all parameters of the optimizer, or None.
        compression: ``Compression.none`` (or None), ``fp16``, ``bf16``, or anything with their two
            functions; sparse gradients travel as they are.
        backward_passes_per_step: passes that are added up on each rank before one reduction.
        op: ``Average``, weighted by samples where ``set_num_samples`` is called; ``Sum``; or
            ``Adasum``: each rank takes a step of its own, and the steps are combined.
        gradient_predivide_factor: with ``Average``: divides before the sum, multiplies it after.
        num_groups: Horovod's old name of a number of ``groups``.
        groups: gradients that travel together: lists of parameters, or a number of groups.
        sparse_as_dense: sum sparse gradients as dense ones; else the rows of all ranks are
            gathered. Either way ``.grad`` is sparse.
        process_set: the ranks to average over; None for all.

    Raises:
        ConfigError: an argument is not valid; a ``ValueError`` too.
        NotInitializedError: ``hpctrain.init()`` was not called.
        MismatchError: the ranks do not have the same parameters.
    """
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step)
    options = ReductionOptions(
        average=op is Average,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        grouping=Grouping(groups),
        check_weights=world.current().settings.check_weights,
    )
    names, comm = names_of(optimizer, named_parameters), _communicator(process_set)
    compressor = compression or Compression.none
    if comm is not None and op is Adasum:
        _combine_steps(optimizer, comm, compressor, names)
    elif comm is not None:
        reduction = _reduction(comm, compressor, options)
        _reduce_gradients(optimizer, reduction, names, backward_passes_per_step)
    return _upgrade(optimizer, names, backward_passes_per_step)


def _upgrade(optimizer: Any, names: Mapping[Tensor, str], passes: int) -> Any:
    """Give the optimizer its methods, now that nothing can fail any more."""
    kind = type(optimizer)
    methods = AdasumMethods if hasattr(optimizer, "_adasum") else DistributedMethods
    optimizer.__class__ = type(kind.__name__, (methods, kind), {})
    optimizer._parameter_names = names  # noqa: SLF001
    optimizer._passes = passes  # noqa: SLF001
    return optimizer


def _reduce_gradients(
    optimizer: Any, reduction: Reduction, names: Mapping[Tensor, str], passes: int
) -> None:
    owner = weakref.ref(optimizer)
    optimizer._reducer = Reducer(  # noqa: SLF001
        reduction,
        lambda: named(owner(), names),
        passes=passes,
        note=world.current().last_call.note,
        is_exclusive=True,
    )
    # They find the reducer by the optimizer: functions that held it would keep both for ever.
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def _combine_steps(
    optimizer: Any, comm: Communicator, compressor: Compressor, names: Mapping[Tensor, str]
) -> None:
    owner = weakref.ref(optimizer)
    optimizer._adasum = AdasumStep(  # noqa: SLF001
        comm, compressor, lambda: named(owner(), names), _header(comm)
    )
    optimizer.register_step_pre_hook(begin_step)
    optimizer.register_step_post_hook(combine_steps)


def _check(optimizer: Optimizer, op: ReduceOp, predivide: float, passes: int) -> None:
    check_passes(passes)
    if isinstance(optimizer, DistributedMethods):
        raise ConfigError("this optimizer is distributed already; wrap it once")
    if op not in (Average, Sum, Adasum):
        raise ConfigError(f"op must be Average, Sum or Adasum, got {op!r}")
    if predivide != 1.0 and op is not Average:
        raise ConfigError(
            f"gradient_predivide_factor splits the division of op=Average, got {predivide} with "
            f"{op!r}; leave it out"
        )
    if not 0 < predivide < math.inf:
        raise ConfigError(f"gradient_predivide_factor must be above 0, got {predivide}")


def _reduction(comm: Communicator, compressor: Compressor, options: ReductionOptions) -> Reduction:
    plan, codec = world.current().plan, codec_for(compressor)
    return Reduction(comm, plan, codec, options, _header(comm))


def _header(comm: Communicator) -> StepHeader:
    """Return what opens the steps over these ranks. Collective the first time."""
    headers = world.current().step_headers
    if comm not in headers:
        headers[comm] = StepHeader(comm)
    return cast("StepHeader", headers[comm])


def _communicator(process_set: ProcessSet | None) -> Communicator | None:
    """Return what to average over; None where there is nobody else."""
    here, process_set = world.current(), process_set or global_process_set
    if process_set.process_set_id is not None and not process_set.included():
        return None
    comm = here.sets.communicator(process_set)
    return comm if comm.size > 1 else None
