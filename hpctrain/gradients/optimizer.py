"""``DistributedOptimizer``: any torch optimizer, stepping on gradients averaged over all ranks."""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialNode
from hpctrain.compress.by_name import Compressing, codec_for, compressor_for
from hpctrain.compress.codec import Codec
from hpctrain.compress.half import Compression
from hpctrain.compress.savings import Savings
from hpctrain.core.checks import Amount, Number, checked
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import dynamo_disable, leave_scaling_to
from hpctrain.gradients.adasum_step import AdasumStep
from hpctrain.gradients.averaged_gradients import AveragedGradients
from hpctrain.gradients.bucket_reducer import ParameterSource
from hpctrain.gradients.loss_scale import unscale_by_exchange
from hpctrain.gradients.node_values import is_shared, require_no_masters
from hpctrain.gradients.optimizer_exchange import NoExchange, OptimizerExchange, exchange_of
from hpctrain.gradients.parameter_names import Grouping, Groups, named, names_of, places_of
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sample_count import NUM_FLAGS, SampleCount
from hpctrain.gradients.sharded_reduction import ShardedReduction
from hpctrain.gradients.sharded_step import ShardedStep
from hpctrain.gradients.step_counter import steps_over
from hpctrain.negotiation.request import Adasum, Average, ReduceOp, Sum
from hpctrain.runtime import world
from hpctrain.runtime.process_sets import ProcessSet, global_process_set
from hpctrain.runtime.rebuild import RebuildStage


def DistributedOptimizer(  # noqa: N802, PLR0913, PLR0917 - Horovod's name and arguments
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Compressing | None = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    process_set: ProcessSet | None = global_process_set,
    shard: str | None = None,
    master_dtype: torch.dtype | None = None,
) -> Any:
    """Make ``optimizer`` step on gradients that are averaged over all ranks.

    The optimizer is changed in place and returned: schedulers, scalers and hooks continue to work,
    and ``isinstance`` stays true. When ``backward()`` returns, every ``.grad`` is the average, so
    gradient clipping and unscaling use averages. A later step uses its memory again: clone what
    you keep. Nothing happens outside ``process_set``, and, but for masters, in a world of one.
    Collective over the process set, as are ``backward()`` and ``step()``. Several optimizers may
    share one backward, if all ranks' hooks fire in the same order.

    Args:
        optimizer: any torch optimizer, already holding the parameters.
        named_parameters: names for messages: of all parameters of the optimizer, or None.
        compression: of dense gradients: ``Compression.none``, ``fp16``, ``bf16``, a codec or its
            name (``hpctrain guide compression``), or anything with Horovod's two functions.
        backward_passes_per_step: passes that are added up on each rank before one reduction.
        op: ``Average``, weighted by ``set_num_samples``; ``Sum``; or ``Adasum``, of ranks' steps.
        gradient_predivide_factor: with ``Average``: divides before the sum, multiplies it after.
        num_groups: Horovod's old name of a number of ``groups``.
        groups: gradients that travel together: lists of parameters, or a number of groups.
        sparse_as_dense: sum sparse gradients as dense ones, gather no rows; ``.grad`` is sparse.
        process_set: the ranks to average over; None for all.
        shard: ``"node"`` keeps parameters and state once per node; see ``hpctrain guide sharded``.
        master_dtype: with ``shard``: in which parameters of 16 bits are kept and stepped, too.

    Raises:
        ConfigError: an argument is not valid; a ``ValueError`` too.
        NotInitializedError: ``hpctrain.init()`` was not called.
        MismatchError: the ranks do not have the same parameters.
    """
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step, shard)
    grouping = Grouping(_groups(num_groups, groups), sparse_as_dense=sparse_as_dense)
    count = SampleCount(average=op is Average, predivide=gradient_predivide_factor)
    require_no_masters(None if shard else master_dtype)
    names, comm = names_of(optimizer, named_parameters), _communicator(process_set, master_dtype)
    passes, codec = backward_passes_per_step, codec_for(compression, optimizer)
    if comm is None:
        return _upgraded(optimizer, NoExchange(), names, passes)
    parameters, steps = partial(named, weakref.ref(optimizer), names), steps_over(comm)
    how = comm, world.current().plan, codec, grouping, count, steps
    if op is Adasum:
        exchange: Any = AdasumStep(comm, compressor_for(compression), parameters, steps)
    elif is_shared(shard, comm, codec):
        exchange = ShardedStep(ShardedReduction(*how), parameters, optimizer, master_dtype)
    else:
        exchange = _averaging(comm, Reduction(*how), parameters, passes, master_dtype)
    return _upgraded(optimizer, exchange, names, passes)


def _averaging(
    comm: Communicator,
    reduction: Reduction,
    parameters: ParameterSource,
    passes: int,
    master_dtype: torch.dtype | None,
) -> AveragedGradients:
    require_no_masters(master_dtype)
    here = world.current()
    return AveragedGradients(
        reduction,
        parameters,
        here.last_call.note,
        passes=passes,
        is_over_world=comm is here.comm,
    )


class DistributedMethods:
    """What ``DistributedOptimizer`` adds to the optimizer that it is given."""

    _exchange: OptimizerExchange
    _parameter_names: dict[Tensor, str]  # of all parameters, the same on every rank
    _passes = 1

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._exchange.steps.raised_flags

    def raise_flags(self, flags: int) -> None:
        """Report these bits to every rank, in ``raised_flags`` at the end of a step.

        The message that opens a step contains them, until other flags are given. Not collective;
        call it before ``backward``.

        Args:
            flags: bits 0 to 3, such as "somebody asked me to stop".

        Raises:
            ConfigError: there are other bits.
        """
        if not 0 <= flags < 1 << NUM_FLAGS:
            raise ConfigError(f"flags are bits 0 to {NUM_FLAGS - 1}, got {flags:#b}")
        self._exchange.steps.flags = flags

    @property
    def mean_loss(self) -> float:
        """Mean of the losses given to ``tell_loss``, over all samples of the last step.

        The same on every rank, known when ``backward()`` has returned, with ``shard="node"`` when
        ``synchronize()`` has; NaN before any loss is given.
        """
        return self._exchange.steps.mean_loss

    def tell_loss(self, loss: float) -> None:
        """Report the loss of a step, of which every rank sees the mean in ``mean_loss``.

        The message that opens a step contains it, weighted as gradients are. Not collective, but
        every rank calls it, before ``backward``; a rank without samples gives 0.
        """
        self._exchange.steps.loss = loss

    @property
    def sums_are_finite(self) -> bool | None:
        """Whether the averages of the last backward are finite, as ``look_at_sums`` asks for.

        The same on every rank, until the step. None where that is not known: before a backward,
        with a codec, sparse gradients, Adasum, ``shard``, accelerators that sum by themselves,
        ranks without memory in common, and in a world of one.
        """
        return self._exchange.sums_are_finite

    def look_at_sums(self) -> None:
        """Search averages for NaN and infinity while they are summed, from the next step on.

        That costs less than a percent of a step; a search of all gradients after it costs
        several. Not collective, but every rank calls it, between two steps.
        """
        self._exchange.look_at_sums()

    @property
    def communication_seconds(self) -> float:
        """Time in which the last step waited for gradients of other ranks, in seconds."""
        return self._exchange.exposed_seconds

    @property
    def codec(self) -> Codec | None:
        """By what gradients travel, with a ``state_dict()`` of each rank; None if they do not."""
        reduction = self._exchange.reduction
        return None if reduction is None else reduction.codec

    @property
    def savings(self) -> Savings | None:
        """What ``codec`` spares between nodes; None if nothing travels."""
        reduction = self._exchange.reduction
        return None if reduction is None else reduction.savings

    @property
    def backward_passes_per_step(self) -> int:
        """Passes that are added up on each rank before one reduction."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of passes that are added up, from the next backward on.

        Not collective, but every rank calls it, between two steps. Raises ``ConfigError``: it is
        less than 1.
        """
        _check_passes(passes)
        self._passes = passes
        self._exchange.set_passes(passes)

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of, from the next backward on.

        With different counts the average gradient is weighted by them, so that it is the mean
        over all samples of the step. Not collective, but every rank calls it, or none does.

        Args:
            num_samples: of this rank in each pass of this step; 0 where it has none and skips
                backward.
            nominal: the usual count, the same on every rank.

        Raises:
            ConfigError: the count is not valid, changes between the passes of a step, or the
                optimizer sums.
        """
        self._exchange.set_num_samples(num_samples, nominal)

    def synchronize(self) -> None:
        """Average the gradients now, if ``backward()`` has not done so already. Collective.

        Needed only by a rank that skips ``backward``: there it stands in its place, before
        gradients are clipped and before any other collective of the step. Everywhere else it is
        harmless, as is ``skip_synchronize``. With ``shard="node"`` the ranks compare here what
        they are about to step on, ``raised_flags`` are known then, and ``step()`` averages: all
        ranks call this, or those alone that skip ``backward()`` in this step.
        """
        self._exchange.was_synchronized |= self._exchange.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Let ``step()`` inside come after ``synchronize()`` without a warning.

        Gradients are averaged once in any case, and what was changed since stays changed where
        all ranks have changed it alike. Raises ``ConfigError`` with ``op=Adasum``.
        """
        self._exchange.require_skippable()
        return self._without_warning()

    @contextmanager
    def _without_warning(self) -> Iterator[None]:
        self._exchange.warns = False
        try:
            yield
        finally:
            self._exchange.warns = True

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the averaged gradients of all parameters together; return their norm.

        As ``torch.nn.utils.clip_grad_norm_``, for any ``shard``; between ``backward()`` and
        ``step()``. Every rank calls it. Collective with ``shard="node"``.

        Raises:
            RuntimeError: the norm is not finite, and that was to be an error.
        """
        self._exchange.begin_clipping()
        return self._exchange.clip_norm(
            self._stepped(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip averaged elements, as ``torch.nn.utils.clip_grad_value_``; all ranks call it."""
        self._exchange.begin_clipping()
        self._exchange.clip_value(self._stepped(), clip_value)

    def _stepped(self) -> list[Tensor]:
        return [p for _, p in places_of(self)]  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Forget the gradients; see ``torch.optim.Optimizer.zero_grad``.

        Harmless at any time: no gradient is on its way when ``backward()`` has returned. With
        ``op=Adasum``, a rank that then takes the next batch, without a step, has left one out.
        """
        self._exchange.new_step()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: Any) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``. All ranks do."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._exchange.hook()

    def load_state_dict(self, state_dict: Any) -> None:
        """Replace the state; see ``torch.optim.Optimizer.load_state_dict``.

        What a backward that raised has left behind is forgotten.
        """
        self._exchange.start_again()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._exchange.state_loaded(state_dict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy would step on gradients that nobody averages."""
        raise ConfigError(
            "a distributed optimizer cannot be copied or pickled; keep its state_dict(), and wrap "
            "an optimizer of the copied model"
        )


unscale_by_exchange()


METHOD_MARK = "_local_method"
"""The attribute of an optimizer that names the local or asynchronous method which hooks it."""


def require_plain(method: str, optimizer: object) -> None:
    """Raise ``ConfigError`` if the optimizer of a method averages gradients by itself."""
    if isinstance(optimizer, DistributedMethods):
        raise ConfigError(
            f"{method} takes the plain optimizer, this one averages gradients in every step; "
            f"leave DistributedOptimizer out"
        )


@dynamo_disable
def before_step(
    stepping: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a step of all ranks: torch calls this at the start of ``step()``.

    A closure among the arguments makes gradients inside, so the exchange wraps it.
    """
    exchange = exchange_of(stepping)
    assert exchange is not None
    if exchange.was_synchronized and exchange.warns:
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() after "
            "optimizer.synchronize(); it changes nothing here, since gradients are averaged once, "
            "when backward() returns: leave synchronize() out",
            stacklevel=3,
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    wrapped = exchange.begin_step(stepping, closure)
    return None if wrapped is closure else (args[:1], kwargs | {"closure": wrapped})


@dynamo_disable
def after_step(stepped: Any, *_: object) -> None:
    """End a step of all ranks: torch calls this after ``step()``."""
    exchange = exchange_of(stepped)
    assert exchange is not None
    exchange.was_synchronized = False
    exchange.end_step()


def _upgraded(
    optimizer: Any, exchange: OptimizerExchange, names: Mapping[Tensor, str], passes: int
) -> Any:
    """Give the optimizer its methods, now that nothing can fail any more."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (DistributedMethods, kind), {})
    vars(optimizer).update(_exchange=exchange, _parameter_names=names, _passes=passes)
    if exchange.unscales:
        leave_scaling_to(optimizer)
    if not isinstance(exchange, NoExchange):
        # They find it by the optimizer: functions that held it would keep both for ever.
        optimizer.register_step_pre_hook(before_step)
        optimizer.register_step_post_hook(after_step)
        _let_move(exchange)
    return optimizer


def _let_move(exchange: OptimizerExchange) -> None:
    """Let an exchange continue in a world without the ranks that were lost."""
    kept = weakref.ref(exchange)

    def move() -> None:
        if (moved := kept()) is not None:
            here = world.current()
            moved.rebind(here.comm, here.plan)
            _let_move(moved)

    world.current().rebuild.register(RebuildStage.HOLDERS, move=move)


def _groups(num_groups: int, groups: Groups | None) -> Groups | None:
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=3)
    return num_groups or None if groups is None else groups


def _check_passes(passes: int) -> None:
    checked("backward_passes_per_step", passes, Number)


def _check(
    optimizer: Optimizer, op: ReduceOp, predivide: float, passes: int, shard: str | None
) -> None:
    _check_passes(passes)
    if isinstance(optimizer, DistributedMethods):
        raise ConfigError("this optimizer is distributed already; wrap it once")
    if op not in (Average, Sum, Adasum):
        raise ConfigError(f"op must be Average, Sum or Adasum, got {op!r}")
    if predivide != 1.0 and op is not Average:
        raise ConfigError(
            f"gradient_predivide_factor splits the division of op=Average, got {predivide} with "
            f"{op!r}; leave it out"
        )
    checked("gradient_predivide_factor", predivide, Amount)
    checked("shard", shard, Literal["node"] | None)
    if shard and op is Adasum:
        raise ConfigError('op=Adasum combines whole steps of ranks, not with shard="node"')


def _communicator(
    process_set: ProcessSet | None, master_dtype: torch.dtype | None
) -> Communicator | None:
    """Return what to average over; None where nobody else is, and no masters are to be kept."""
    here, process_set = world.current(), process_set or global_process_set
    if process_set.process_set_id is not None and not process_set.included():
        return None
    comm = here.sets.communicator(process_set)
    if comm.size > 1:
        return comm
    return None if master_dtype is None else SerialNode()
