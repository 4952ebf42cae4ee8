"""``OptimizerExchange``: the communication in the steps of a ``DistributedOptimizer``."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.norms import clip_grad_norm_
from hpctrain.comm.plan.plan import Plan
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sample_count import SampleCount, check_count

Closure = Callable[[], Any] | None


class StepFacts(Protocol):
    """Flags and losses that ranks exchange in the step message."""

    flags: int  # bits that this rank raises
    loss: float  # mean loss over the samples of this rank

    @property
    def raised_flags(self) -> int:
        """Flags that any rank raised in the last message; the same on every rank."""

    @property
    def mean_loss(self) -> float:
        """Mean loss over all samples in the last message; the same on every rank."""


class OptimizerExchange:
    """Combines the gradients or the steps of all ranks for a ``DistributedOptimizer``.

    The base class is for an optimizer that uses ``.grad`` of this rank and sends nothing;
    subclasses override methods.
    """

    unscales = False
    """Whether ``step()``, instead of ``GradScaler``, unscales gradients and skips overflows."""
    reduction: Reduction | None = None  # None if no gradients are sent
    was_synchronized = False  # whether ``synchronize()`` was called without effect in this step
    warns = True  # whether ``step()`` warns of such a call

    @property
    def steps(self) -> StepFacts:
        """Flags and losses that the ranks exchange."""
        raise NotImplementedError

    @property
    def exposed_seconds(self) -> float:
        """Seconds for which the last step waited for other ranks."""
        return 0.0

    @property
    def count(self) -> SampleCount | None:
        """Weights of the ranks' gradients; None if gradients are not weighted."""
        return None

    @property
    def sums_are_finite(self) -> bool | None:
        """Whether the averages of the last backward are finite; None if unknown."""
        return None

    def look_at_sums(self) -> None:
        """Compute ``sums_are_finite`` from the next step on."""

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes that each rank accumulates before one reduction."""

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Set the number of samples by which this rank's gradient is weighted."""
        check_count(num_samples, nominal)  # for the same errors in a world of one rank

    def synchronize(self) -> bool:
        """Combine the gradients that ``backward()`` has not combined. Collective.

        Returns:
            Whether the call had no effect, because ``backward()`` has combined all gradients.
        """
        return False

    def require_skippable(self) -> None:
        """Raise ``ConfigError`` if ``skip_synchronize()`` is not possible, as with Adasum."""

    def begin_clipping(self) -> None:
        """Combine the gradients before clipping if this rank has skipped ``backward``.

        Collective if ``backward`` was skipped.
        """

    def clip_norm(
        self,
        parameters: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Clip the combined gradients by their norm; return the norm."""
        return clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_value(self, parameters: Sequence[Tensor], value: float) -> None:
        """Clamp the elements of the combined gradients."""
        clip_grad_value_(parameters, value)

    def unscale(self, inverse_scale: Tensor, *, allows_fp16: bool) -> bool | None:
        """Unscale averaged gradients that are not in ``.grad``.

        Returns:
            Whether any gradient is not finite; None if the step uses ``.grad``, which torch
            unscales.
        """
        del inverse_scale, allows_fp16
        return None

    def new_step(self) -> None:
        """Prepare for the gradients of the next step; called before ``zero_grad()``."""

    def hook(self) -> None:
        """Hook parameters that were added to the optimizer."""

    def start_again(self) -> None:
        """Discard the gradients of a failed backward; called before the state is replaced."""

    def state_loaded(self, state_dict: dict[str, Any]) -> None:
        """Correct the optimizer state after torch has loaded ``state_dict``."""

    def begin_step(self, stepping: Optimizer, closure: Closure) -> Closure:
        """Begin ``step()``; return the closure that the optimizer must call. Collective."""
        del stepping
        return closure

    def end_step(self) -> None:
        """End ``step()``. Collective."""

    def rebind(self, comm: Communicator, plan: Plan) -> None:
        """Continue in a world without the lost ranks. Collective over ``comm``.

        Raises:
            ConfigError: this exchange cannot continue; raised on all ranks.
        """
        del plan
        raise ConfigError(
            f"an optimizer that continues without lost ranks must have neither shard, op=Adasum "
            f"nor a process set, but this optimizer has one of these, with {comm.size} ranks in "
            f"the next world; restart from the last checkpoint, or leave these options out"
        )


class NoExchange(OptimizerExchange):
    """Exchange for a rank that communicates with no other rank."""

    flags, loss = 0, math.nan

    @property
    def steps(self) -> StepFacts:
        """Flags and loss of this rank."""
        return self

    @property
    def raised_flags(self) -> int:
        """Flags of this rank."""
        return self.flags

    @property
    def mean_loss(self) -> float:
        """Loss of this rank."""
        return self.loss


def exchange_of(optimizer: Any) -> OptimizerExchange | None:
    """Return the exchange of a ``DistributedOptimizer``; None for other optimizers."""
    found = getattr(optimizer, "__dict__", {}).get("_exchange")
    return found if isinstance(optimizer, Optimizer) else None
