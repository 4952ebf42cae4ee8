"""``AveragedGradients``, which averages or sums gradients for a ``DistributedOptimizer``."""

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.plan import Plan
from hpctrain.gradients.bucket_reducer import ParameterSource, Reducer
from hpctrain.gradients.optimizer_exchange import OptimizerExchange
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.step_counter import steps_over
from hpctrain.runtime import world


class AveragedGradients(Reducer, OptimizerExchange):
    """Averages the gradients of an optimizer over all ranks by the end of ``backward()``.

    The constructor allocates the buckets and hooks the parameters; it is collective.

    Args:
        reduction: reduction that sends the gradients.
        parameters: function that returns the current parameters with their names.
        passes: backward passes that are accumulated before one reduction.
    """

    reduction: Reduction

    def __init__(self, reduction: Reduction, parameters: ParameterSource, *, passes: int) -> None:
        here = world.current()
        super().__init__(reduction, parameters, here.last_call.note, passes=passes)
        self._is_over_world = reduction.is_over(here.comm)  # only then ``rebind`` is possible

    @property
    def sums_are_finite(self) -> bool | None:
        """Whether the averages of the last backward are finite; None if unknown."""
        return self.reduction.is_finite

    def look_at_sums(self) -> None:
        """Compute ``sums_are_finite`` from the next step on."""
        self.reduction.looks = True

    def synchronize(self) -> bool:
        """Average the gradients that ``backward()`` has not averaged. Collective."""
        return not self.finish()

    def begin_clipping(self) -> None:
        """Average the gradients before clipping if this rank has skipped ``backward``.

        Collective if ``backward`` was skipped.
        """
        if not self.has_begun:
            self.finish()

    def rebind(self, comm: Communicator, plan: Plan) -> None:
        """Continue with averages over the ranks of ``comm``, in a rebuilt world. Collective."""
        if not self._is_over_world:
            super().rebind(comm, plan)
        self.move_to(self.reduction.over(comm, plan, steps_over(comm)))
