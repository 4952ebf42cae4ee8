"""``DistributedOptimizer``: a torch optimizer that steps on gradients averaged over all ranks."""

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
from hpctrain.compress.codec import Codec, Savings
from hpctrain.compress.half import Compression
from hpctrain.core.checks import Amount, Number, checked
from hpctrain.core.errors import ConfigError, HpctrainDeprecationWarning
from hpctrain.core.lazy import imported
from hpctrain.core.torch_compat import dynamo_disable, leave_scaling_to
from hpctrain.gradients.averaged_gradients import AveragedGradients
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
    and ``isinstance`` checks of its class remain true. When ``backward()`` returns, every
    ``.grad`` is the average, so gradient clipping and unscaling use averages. The next step
    overwrites the memory of ``.grad``: clone gradients that must outlive the step. Ranks outside
    ``process_set`` do not communicate. A world of one rank does not communicate, except with
    ``master_dtype``. This function, ``backward()`` and ``step()`` are collective over the process
    set. Several optimizers may share one backward if the hooks fire in the same order on all
    ranks.

    Args:
        optimizer: any torch optimizer; more parameters can be added later.
        named_parameters: pairs of name and parameter, for all parameters of the optimizer; the
            names appear in messages. None to name parameters by position.
        compression: compression of dense gradients: ``Compression.none``, ``fp16``, ``bf16``, a
            codec or its name (``hpctrain guide compression``), or an object with the two methods
            of Horovod compressors.
        backward_passes_per_step: backward passes that each rank accumulates before one reduction.
        op: ``Average``, weighted by ``set_num_samples``; ``Sum``; or ``Adasum``, which combines
            the steps of the ranks.
        gradient_predivide_factor: with ``Average``: factor by which gradients are divided before
            the sum; the sum is multiplied by the factor.
        num_groups: deprecated; use an integer ``groups``.
        groups: gradients that are sent in one message: lists of parameters, or a number of groups.
        sparse_as_dense: whether sparse gradients are summed as dense tensors instead of gathering
            their rows; ``.grad`` is sparse in both cases.
        process_set: ranks to average over; None for all ranks.
        shard: ``"node"`` stores parameters and optimizer state once per node; see ``hpctrain guide
            sharded``.
        master_dtype: with ``shard``: dtype of additional copies of 16-bit parameters; the
            optimizer updates the copies. None for no copies.

    Raises:
        ConfigError: an argument is not valid; also a ``ValueError``.
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
        adasum_step = imported("hpctrain.gradients.adasum_step:AdasumStep")  # few programs use it
        exchange: Any = adasum_step(comm, compressor_for(compression), parameters, steps)
    elif is_shared(shard, comm, codec):
        exchange = ShardedStep(ShardedReduction(*how), parameters, optimizer, master_dtype)
    else:
        require_no_masters(master_dtype)
        exchange = AveragedGradients(Reduction(*how), parameters, passes=passes)
    return _upgraded(optimizer, exchange, names, passes)


class DistributedMethods:
    """Methods that ``DistributedOptimizer`` adds to an optimizer."""

    _exchange: OptimizerExchange
    _parameter_names: dict[Tensor, str]  # names of all parameters, identical on every rank
    _passes = 1

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._exchange.steps.raised_flags

    def raise_flags(self, flags: int) -> None:
        """Send flags to all ranks, which read the flags in ``raised_flags`` after the next step.

        The flags are sent in every following step, until the next call. Not collective; call this
        method before ``backward``.

        Args:
            flags: bits 0 to 3, for example a bit that requests a stop.

        Raises:
            ConfigError: another bit is set.
        """
        if not 0 <= flags < 1 << NUM_FLAGS:
            raise ConfigError(
                f"flags must be bits 0 to {NUM_FLAGS - 1}, got {flags:#b}; set other bits to 0"
            )
        self._exchange.steps.flags = flags

    @property
    def mean_loss(self) -> float:
        """Mean loss over all samples of the last step, from the losses passed to ``report_loss``.

        The same on every rank. Available after ``backward()``, or with ``shard="node"`` after
        ``synchronize()``; NaN before the first loss.
        """
        return self._exchange.steps.mean_loss

    def report_loss(self, loss: float) -> None:
        """Pass the loss of this rank, from which ``mean_loss`` is computed on all ranks.

        The loss has the same weight as the gradients of the rank. Not collective, but every rank
        calls this method before ``backward``; a rank without samples passes 0.
        """
        self._exchange.steps.loss = loss

    @property
    def sums_are_finite(self) -> bool | None:
        """Whether the averages of the last backward are finite; requires ``look_at_sums``.

        The value is the same on every rank, and valid until ``step()``. The value is None before
        the first backward; with a codec, sparse gradients, Adasum or ``shard``; if accelerators
        compute the sums; if the ranks of a node share no memory; and in a world of one rank.
        """
        return self._exchange.sums_are_finite

    def look_at_sums(self) -> None:
        """Check averages for NaN and infinity in every later step; see ``sums_are_finite``.

        This check takes less than one percent of a step; a check of all gradients after the sum
        takes several percent. Not collective, but every rank calls this method between two steps.
        """
        self._exchange.look_at_sums()

    @property
    def communication_seconds(self) -> float:
        """Seconds for which the last step waited for gradients of other ranks."""
        return self._exchange.exposed_seconds

    @property
    def codec(self) -> Codec | None:
        """Codec of the gradients; None if no gradients are sent.

        The ``state_dict()`` of the codec differs between ranks.
        """
        reduction = self._exchange.reduction
        return None if reduction is None else reduction.codec

    @property
    def savings(self) -> Savings | None:
        """Traffic between nodes with and without ``codec``; None if no gradients are sent."""
        reduction = self._exchange.reduction
        return None if reduction is None else reduction.savings

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that each rank accumulates before one reduction."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of accumulated backward passes, from the next backward on.

        Not collective, but every rank calls this method between two steps.

        Raises:
            ConfigError: ``passes`` is less than 1.
        """
        _check_passes(passes)
        self._passes = passes
        self._exchange.set_passes(passes)

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Set the number of samples of this rank, from the next backward on.

        The average gradient is weighted by these counts, so that it is the mean over all samples
        of the step. Not collective, but all ranks call this method or none does.

        Args:
            num_samples: samples over which this rank's loss is the mean, in each backward pass of
                this step; 0 for a rank without samples, which skips backward.
            nominal: usual number of samples, the same on every rank.

        Raises:
            ConfigError: a number is not valid or changes between the passes of a step, or ``op``
                is not ``Average``.
        """
        self._exchange.set_num_samples(num_samples, nominal)

    def synchronize(self) -> None:
        """Average the gradients that ``backward()`` has not averaged. Collective.

        A rank that skips ``backward`` must call this method before gradient clipping and before
        any other collective of the step. On other ranks the call is a no-op. With
        ``shard="node"`` this method only compares the ranks and sets ``raised_flags``, and
        ``step()`` averages the gradients; either all ranks call this method, or only the ranks
        that skip ``backward()`` in this step.
        """
        self._exchange.was_synchronized |= self._exchange.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a context in which ``step()`` after ``synchronize()`` does not warn.

        Gradients are averaged once, with or without the context. Changes of averaged gradients are
        kept if all ranks have made the same changes.

        Raises:
            ConfigError: ``op`` is ``Adasum``.
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
        """Clip the averaged gradients of all parameters by their total norm; return the norm.

        Like ``torch.nn.utils.clip_grad_norm_``, for any ``shard``. Every rank calls this method
        between ``backward()`` and ``step()``. Collective with ``shard="node"``.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is True.
        """
        self._exchange.begin_clipping()
        return self._exchange.clip_norm(
            self._stepped(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp averaged gradients like ``torch.nn.utils.clip_grad_value_``.

        Every rank calls this method between ``backward()`` and ``step()``.
        """
        self._exchange.begin_clipping()
        self._exchange.clip_value(self._stepped(), clip_value)

    def _stepped(self) -> list[Tensor]:
        return [p for _, p in places_of(self)]  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Clear the gradients; see ``torch.optim.Optimizer.zero_grad``.

        Safe at any time: no gradient is in flight after ``backward()`` has returned. With
        ``op=Adasum``, a rank that clears gradients and continues with the next batch without
        ``step()`` has skipped a step.
        """
        self._exchange.new_step()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: Any) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``. Called on all ranks."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._exchange.hook()

    def load_state_dict(self, state_dict: Any) -> None:
        """Replace the optimizer state; see ``torch.optim.Optimizer.load_state_dict``.

        Gradients of a backward that raised an error are discarded.
        """
        self._exchange.start_again()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._exchange.state_loaded(state_dict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ``ConfigError``, since a copy would have no hooks that average gradients."""
        raise ConfigError(
            "a DistributedOptimizer must not be copied or pickled; copy its state_dict(), and "
            "wrap an optimizer of the copied model"
        )


unscale_by_exchange()


METHOD_MARK = "_local_method"
"""Attribute of an optimizer: name of the local or asynchronous method that has hooked it."""


def require_plain(method: str, optimizer: object) -> None:
    """Raise ``ConfigError`` if ``optimizer`` is a ``DistributedOptimizer``."""
    if isinstance(optimizer, DistributedMethods):
        raise ConfigError(
            f"{method} must get a plain optimizer, got a DistributedOptimizer, which averages "
            f"gradients in every step; leave DistributedOptimizer out"
        )


@dynamo_disable
def before_step(
    stepping: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a step of the exchange; torch calls this hook at the start of ``step()``.

    A closure of ``step()`` computes gradients, so the exchange wraps the closure.
    """
    exchange = exchange_of(stepping)
    assert exchange is not None
    if exchange.was_synchronized and exchange.warns:
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() after "
            "optimizer.synchronize(); synchronize() has no effect after backward(), which "
            "averages gradients; leave synchronize() out",
            stacklevel=3,
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    wrapped = exchange.begin_step(stepping, closure)
    return None if wrapped is closure else (args[:1], kwargs | {"closure": wrapped})


@dynamo_disable
def after_step(stepped: Any, *_: object) -> None:
    """End a step of the exchange; torch calls this hook after ``step()``."""
    exchange = exchange_of(stepped)
    assert exchange is not None
    exchange.was_synchronized = False
    exchange.end_step()


def _upgraded(
    optimizer: Any, exchange: OptimizerExchange, names: Mapping[Tensor, str], passes: int
) -> Any:
    """Add ``DistributedMethods`` and hooks to ``optimizer``; called after all checks."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (DistributedMethods, kind), {})
    vars(optimizer).update(_exchange=exchange, _parameter_names=names, _passes=passes)
    if exchange.unscales:
        leave_scaling_to(optimizer)
    if not isinstance(exchange, NoExchange):
        # The hooks do not refer to the exchange, because that would keep the optimizer alive.
        optimizer.register_step_pre_hook(before_step)
        optimizer.register_step_post_hook(after_step)
        _register_move(exchange)
    return optimizer


def _register_move(exchange: OptimizerExchange) -> None:
    """Make ``exchange`` continue with the remaining ranks when the world is rebuilt."""
    kept = weakref.ref(exchange)

    def move() -> None:
        if (moved := kept()) is not None:
            here = world.current()
            moved.rebind(here.comm, here.plan)
            _register_move(moved)

    world.current().rebuild.register(RebuildStage.HOLDERS, move=move)


def _groups(num_groups: int, groups: Groups | None) -> Groups | None:
    if num_groups:
        what = "num_groups is deprecated; use groups"
        warnings.warn(what, HpctrainDeprecationWarning, stacklevel=3)
    return num_groups or None if groups is None else groups


def _check_passes(passes: int) -> None:
    checked("backward_passes_per_step", passes, Number)


def _check(
    optimizer: Optimizer, op: ReduceOp, predivide: float, passes: int, shard: str | None
) -> None:
    _check_passes(passes)
    if isinstance(optimizer, DistributedMethods):
        raise ConfigError(
            "optimizer must be a plain optimizer, got a DistributedOptimizer; wrap the optimizer "
            "once"
        )
    if op not in (Average, Sum, Adasum):
        raise ConfigError(f"op must be Average, Sum or Adasum, got {op!r}")
    if predivide != 1.0 and op is not Average:
        raise ConfigError(
            f"gradient_predivide_factor must be 1 unless op is Average, got {predivide} with "
            f"{op!r}; leave gradient_predivide_factor out"
        )
    checked("gradient_predivide_factor", predivide, Amount)
    checked("shard", shard, Literal["node"] | None)
    if shard and op is Adasum:
        raise ConfigError(
            'op must be Average or Sum with shard="node", got Adasum; leave shard out'
        )


def _communicator(
    process_set: ProcessSet | None, master_dtype: torch.dtype | None
) -> Communicator | None:
    """Return the ranks to average over; None if this rank needs no communicator.

    A rank outside ``process_set`` and a single rank without master copies need none.
    """
    here, process_set = world.current(), process_set or global_process_set
    if process_set.process_set_id is not None and not process_set.included():
        return None
    comm = here.sets.communicator(process_set)
    if comm.size > 1:
        return comm
    return None if master_dtype is None else SerialNode()
