"""``DistributedOptimizer``: any torch optimizer, stepping on gradients averaged over all ranks."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.compress.identity import Identity
from hpctrain.errors import ConfigError
from hpctrain.runtime import world
from hpctrain.runtime.functions import Average, ReduceOp, Sum, require_default
from hpctrain.sync.gradient_buckets import NamedParameters
from hpctrain.sync.reducer import Reducer
from hpctrain.sync.reduction import Reduction
from hpctrain.sync.sample_count import NUM_FLAGS


class DistributedMethods:
    """What ``DistributedOptimizer`` adds to the optimizer that it is given."""

    _reducer: Reducer | None = None
    _own_flags = 0  # in a world of one

    @property
    def communication_seconds(self) -> float:
        """Time in which the last step waited for gradients of other ranks, in seconds."""
        return self._reducer.exposed_seconds if self._reducer else 0.0

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of, from the next backward on.

        With different counts the average gradient is weighted by them, so that it is the mean
        over all samples of the step. Not collective, but every rank calls it, or none does.

        Args:
            num_samples: of this rank in each pass of this step; 0 where it has none and skips
                backward.
            nominal: the usual count, the same on every rank; float16 gradients need it, since
                they are multiplied by ``num_samples / nominal``.

        Raises:
            ConfigError: the count is not valid, changes between the passes of a step, or the
                optimizer sums.
        """
        if self._reducer:
            self._reducer.set_num_samples(num_samples, nominal)

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._reducer.raised_flags if self._reducer else self._own_flags

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits in ``raised_flags`` when a step is over.

        They ride in a message that is sent anyway, in every step until other flags are given.
        Not collective; call it before ``backward``.

        Args:
            flags: bits 0 to 3, such as "somebody asked me to stop".

        Raises:
            ConfigError: there are other bits.
        """
        if not 0 <= flags < 1 << NUM_FLAGS:
            raise ConfigError(f"flags are bits 0 to {NUM_FLAGS - 1}, got {flags:#b}")
        self._own_flags = flags
        if self._reducer:
            self._reducer.raise_flags(flags)

    def synchronize(self) -> None:
        """Average the gradients now, if ``backward()`` has not done so already. Collective.

        Needed only by a rank that skips ``backward``: there it stands in its place, before
        gradients are clipped and before any other collective of the step.
        """
        if self._reducer:
            self._reducer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Forget the gradients; see ``torch.optim.Optimizer.zero_grad``."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if self._reducer:
            self._reducer.new_step()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy would step on gradients that nobody averages."""
        raise ConfigError(
            "a distributed optimizer cannot be copied or pickled; keep its state_dict(), and wrap "
            "an optimizer of the copied model"
        )


def DistributedOptimizer(  # noqa: N802, PLR0913, PLR0917 - Horovod's name and arguments
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: None = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: None = None,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002, ARG001 - sparse gradients always are
    process_set: None = None,
) -> Any:
    """Make ``optimizer`` step on gradients that are averaged over all ranks.

    The optimizer is changed in place and returned: schedulers, scalers and hooks that know it go
    on to work, and ``isinstance`` stays true. When ``backward()`` returns, every ``.grad`` is the
    average, so clipping and unscaling see the truth. It lies in a buffer that the next step uses
    again: clone what you keep. In a world of one nothing happens.

    Collective, as are ``backward()`` and ``step()`` from then on. Several of them may share one
    backward, if all ranks' hooks fire in the same order.

    Args:
        optimizer: any torch optimizer, already holding the parameters.
        named_parameters: names for messages; usually ``model.named_parameters()``.
        compression: not supported yet; None.
        backward_passes_per_step: passes that are added up on each rank before one reduction.
        op: ``Average``, weighted by samples where ``set_num_samples`` is called, or ``Sum``.
        gradient_predivide_factor: not supported yet; 1.
        num_groups: not supported yet; 0. Gradients travel in buckets anyway.
        groups: not supported yet; None.
        sparse_as_dense: sparse gradients become dense in any case.
        process_set: not supported yet; None, for all ranks.

    Raises:
        ConfigError: an argument is not valid.
        NotInitializedError: ``hpctrain.init()`` was not called.
        MismatchError: the ranks do not have the same parameters.
    """
    _check(backward_passes_per_step, op)
    require_default("compression", compression, None)
    require_default("gradient_predivide_factor", gradient_predivide_factor, 1.0)
    require_default("num_groups", num_groups, 0)
    require_default("groups", groups, None)
    require_default("process_set", process_set, None)
    if isinstance(optimizer, DistributedMethods):
        raise ConfigError("this optimizer is distributed already; wrap it once")
    names = _names(named_parameters)
    reducer = _reducer(optimizer, names, average=op is Average, passes=backward_passes_per_step)
    kind = type(optimizer)
    upgraded: Any = optimizer
    upgraded.__class__ = type(kind.__name__, (DistributedMethods, kind), {})
    if reducer is not None:
        upgraded._reducer = reducer  # noqa: SLF001
        # They find the reducer by the optimizer: hooks that held it would keep both for ever.
        optimizer.register_step_pre_hook(lambda stepping, *_: stepping._reducer.finish())  # noqa: SLF001
        optimizer.register_step_post_hook(lambda stepped, *_: stepped._reducer.new_step())  # noqa: SLF001
    return upgraded


def _check(passes: int, op: ReduceOp) -> None:
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step must be at least 1, got {passes}")
    if op not in (Average, Sum):
        raise ConfigError(f"op must be Average or Sum, got {op!r}")


def _reducer(
    optimizer: Optimizer, names: dict[Parameter, str], *, average: bool, passes: int
) -> Reducer | None:
    here = world.current()
    if here.comm.size == 1:
        return None
    owner = weakref.ref(optimizer)
    reduction = Reduction(here.comm, here.plan, Identity(), average=average)
    return Reducer(reduction, lambda: _trained(owner(), names), passes=passes)


def _names(named_parameters: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    named = list(named_parameters or ())
    times = Counter(name for name, _ in named)
    if repeated := sorted(name for name, count in times.items() if count > 1):
        raise ConfigError(f"names of parameters must differ, got twice: {', '.join(repeated)}")
    return {parameter: name for name, parameter in named}


def _trained(optimizer: Optimizer | None, names: dict[Parameter, str]) -> NamedParameters:
    """Return the parameters that get gradients today, with their names."""
    return [
        (names.get(p) or f"group {g}, parameter {i}", p)
        for g, group in enumerate(optimizer.param_groups if optimizer else ())
        for i, p in enumerate(group["params"])
        if p.requires_grad
    ]
