"""``DistributedOptimizer``: any torch optimizer, stepping on gradients averaged over all ranks."""

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.compress.identity import Identity
from hpctrain.errors import ConfigError
from hpctrain.runtime import world
from hpctrain.runtime.functions import Average, ReduceOp, Sum
from hpctrain.sync.gradient_buckets import NamedParameters
from hpctrain.sync.reducer import Reducer


class DistributedMethods:
    """What ``DistributedOptimizer`` adds to the optimizer that it is given."""

    _reducer: Reducer | None

    @property
    def communication_seconds(self) -> float:
        """Time in which the last step waited for gradients of other ranks, in seconds."""
        return self._reducer.exposed_seconds if self._reducer else 0.0

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of, from the next backward on.

        With different counts the average gradient is weighted by them, so that it is the mean
        over all samples of the step. Not collective, but every rank calls it, or none does.

        Args:
            num_samples: of this rank in this step; 0 where it has none and skips backward.
            nominal: the usual count, the same on every rank; float16 gradients need it, since
                they are multiplied by ``num_samples / nominal``.
        """
        if self._reducer:
            self._reducer.count.set(num_samples, nominal)

    def synchronize(self) -> None:
        """Average the gradients now, if ``backward()`` has not done so already. Collective.

        Needed only by a rank that skips ``backward`` and clips, before it clips.
        """
        if self._reducer:
            self._reducer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Forget the gradients; see ``torch.optim.Optimizer.zero_grad``."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        if self._reducer:
            self._reducer.new_step()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    *,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
) -> Any:
    """Make ``optimizer`` step on gradients that are averaged over all ranks.

    The optimizer is changed in place and returned: schedulers, scalers and hooks that know it go
    on to work, and ``isinstance`` stays true. When ``backward()`` returns, every ``.grad`` is the
    average, so clipping and unscaling see the truth. In a world of one nothing happens.

    Collective, as are ``backward()`` and ``step()`` from then on.

    Args:
        optimizer: any torch optimizer, already holding the parameters.
        named_parameters: names for messages; usually ``model.named_parameters()``.
        backward_passes_per_step: passes that are added up on each rank before one reduction.
        op: ``Average``, weighted by samples where ``set_num_samples`` is called, or ``Sum``.

    Raises:
        ConfigError: an argument is not valid.
        NotInitializedError: ``hpctrain.init()`` was not called.
        MismatchError: the ranks do not have the same parameters.
    """
    if backward_passes_per_step < 1:
        raise ConfigError(
            f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}"
        )
    if op not in (Average, Sum):
        raise ConfigError(f"op must be Average or Sum, got {op!r}")
    if isinstance(optimizer, DistributedMethods):
        raise ConfigError("this optimizer is distributed already; wrap it once")
    names = _names(named_parameters)
    here = world.current()
    upgraded = _upgrade(optimizer)
    upgraded._reducer = None  # noqa: SLF001
    if here.comm.size > 1:
        upgraded._reducer = reducer = Reducer(  # noqa: SLF001
            here.comm,
            here.plan,
            Identity(),
            lambda: _trained(optimizer, names),
            average=op is Average,
            passes=backward_passes_per_step,
        )
        optimizer.register_step_pre_hook(lambda *_: reducer.finish())
        optimizer.register_step_post_hook(lambda *_: reducer.new_step())
    return upgraded


def _upgrade(optimizer: Optimizer) -> Any:
    """Give the object a subclass of its own class that has the added methods."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (DistributedMethods, kind), {})
    return optimizer


def _names(named_parameters: Iterable[tuple[str, Parameter]] | None) -> dict[Parameter, str]:
    named = list(named_parameters or ())
    names = [name for name, _ in named]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"names of parameters must differ, got twice: {', '.join(repeated)}")
    return {parameter: name for name, parameter in named}


def _trained(optimizer: Optimizer, names: dict[Parameter, str]) -> NamedParameters:
    """Return the parameters that get gradients today, with their names."""
    return [
        (names.get(p) or f"group {g}, parameter {i}", p)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad
    ]
