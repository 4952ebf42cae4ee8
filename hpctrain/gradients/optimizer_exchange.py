"""``OptimizerExchange``: how ranks combine the steps of one ``DistributedOptimizer``."""

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
    """What ranks report to each other in the message that opens a step."""

    flags: int  # bits of this rank
    loss: float  # mean over the samples of this rank

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had in the last message; the same on every rank."""

    @property
    def mean_loss(self) -> float:
        """Mean over all samples, as of the last message; the same on every rank."""


class OptimizerExchange:
    """How ranks combine the steps of one ``DistributedOptimizer``.

    The protocol of all exchanges. What is defined here is right for an optimizer that steps on
    the ``.grad`` of this rank and sends nothing; an exchange defines what it does otherwise.
    """

    unscales = False
    """Whether ``step()`` does what a ``GradScaler`` leaves to it, and is called in any case."""
    reduction: Reduction | None = None  # what sends gradients; None where none are sent
    was_synchronized = False  # whether ``synchronize()`` of this step had nothing to combine
    warns = True  # whether ``step()`` warns of that

    @property
    def steps(self) -> StepFacts:
        """Flags and losses of the ranks."""
        raise NotImplementedError

    @property
    def exposed_seconds(self) -> float:
        """Time in which the last step waited for other ranks."""
        return 0.0

    @property
    def count(self) -> SampleCount | None:
        """How gradients of the ranks are weighted; None where no weights apply."""
        return None

    @property
    def sums_are_finite(self) -> bool | None:
        """Whether the averages of the last backward are finite; None where that is not known."""
        return None

    def look_at_sums(self) -> None:
        """Find out ``sums_are_finite``, from the next step on."""

    def set_passes(self, passes: int) -> None:
        """Add up so many backward passes on each rank before one reduction."""

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Weight the gradient of this rank as the mean over ``num_samples``."""
        check_count(num_samples, nominal)  # one rank refuses the counts that several refuse

    def synchronize(self) -> bool:
        """Combine now the gradients that ``backward()`` has not combined. Collective.

        Returns whether ``backward()`` had combined all of them.
        """
        return False

    def require_skippable(self) -> None:
        """Raise ``ConfigError`` where ``step()`` cannot be separated from the exchange."""

    def begin_clipping(self) -> None:
        """Combine the gradients of a rank that has skipped ``backward``. Collective then."""

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
        """Unscale gradients that are not in ``.grad``; return whether some are not finite.

        None where ``.grad`` is what the step uses, which torch unscales.
        """
        del inverse_scale, allows_fp16
        return None

    def new_step(self) -> None:
        """Expect the gradients of another step: ``zero_grad()`` is about to forget these."""

    def hook(self) -> None:
        """Hook the parameters that were added."""

    def start_again(self) -> None:
        """Forget what a backward that raised has left: the state is about to be replaced."""

    def state_loaded(self, state_dict: dict[str, Any]) -> None:
        """Correct the state that torch has loaded."""

    def begin_step(self, stepping: Optimizer, closure: Closure) -> Closure:
        """Begin ``step()``; return the closure that it is to call. Collective."""
        del stepping
        return closure

    def end_step(self) -> None:
        """End ``step()``. Collective."""

    def rebind(self, comm: Communicator, plan: Plan) -> None:
        """Continue in a world without the ranks that were lost. Collective over ``comm``.

        Raises ``ConfigError`` on all ranks where the exchange cannot.
        """
        del plan
        raise ConfigError(
            f"an optimizer with shard, op=Adasum or a process set does not go on without lost "
            f"ranks, got {comm.size} in the next world; start again from the checkpoint, or "
            f"average over all ranks without them"
        )


class NoExchange(OptimizerExchange):
    """The exchange of a rank that steps alone: flags and loss of all ranks are its own."""

    flags, loss = 0, math.nan

    @property
    def steps(self) -> StepFacts:
        """Flags and loss of this rank."""
        return self

    @property
    def raised_flags(self) -> int:
        """Bits of this rank."""
        return self.flags

    @property
    def mean_loss(self) -> float:
        """Loss of this rank."""
        return self.loss


def exchange_of(optimizer: Any) -> OptimizerExchange | None:
    """Return the exchange of a ``DistributedOptimizer``; None for other optimizers."""
    found = getattr(optimizer, "__dict__", {}).get("_exchange")
    return found if isinstance(optimizer, Optimizer) else None
