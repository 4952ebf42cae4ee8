"""``StaleSynchronous``: workers may be some steps apart, and no more."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.async_sgd.requirements import Servers, require_number
from hpctrain.async_sgd.server import ClockedServer
from hpctrain.core.errors import NodeMemoryError


class StaleSynchronous(AsyncMethod):
    """Lets a worker be up to ``staleness`` steps ahead of the slowest one.

    Before its step c (counted from 0) a worker has values with the updates of all workers' steps
    up to c - staleness - 1, its own of all steps before c, and of those of others what has come;
    none of step c or later. An update is the optimizer's step by the mean gradient of all workers
    in one step, summed in rank order. What is read ahead of the slowest worker is stepped by what
    has come of the steps before c, and once a step is complete it counts as a whole.

    So with ``staleness=0`` this is synchronous SGD, for any optimizer: on one node
    ``DistributedOptimizer`` to the bit. A slow moment of one worker is hidden up to ``staleness``
    steps; a worker that is always slow is not.

    Gradients are those of ``step()``: one that is clipped before it is clipped on each rank by
    itself, and not the mean, as in synchronous SGD.

    ``staleness_histogram`` counts, for each read, how many steps before it were not complete.

    Source: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel
    parameter server", NeurIPS. Differs: an update is the step by a mean, not the sum of steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        staleness: int = 2,
        *,
        servers: Servers = None,
        curvature: float | None = None,
    ) -> None:
        """Give all ranks the model of rank 0, start the servers, hook the optimizer. Collective.

        Args:
            model: with equal parameters and buffers on every rank.
            optimizer: a plain one of torch that steps every element by itself, with the same
                settings on every rank in each step. Its state lies on the servers.
            staleness: steps that a worker may be ahead of the slowest one. Each rank has so many
                gradients and one more in node memory.
            servers: None for all ranks, each of which has a part of the parameters and works,
                too; a number of dedicated ranks, the last ones; or a list of them.
            curvature: largest eigenvalue of the Hessian, if known: then a warning says where the
                learning rate is too large for the staleness that is met.

        Raises:
            ConfigError: an argument is not valid; on every rank.
        """
        require_number("staleness", staleness, 0)
        self.staleness = staleness
        try:
            super().__init__(
                model,
                optimizer,
                servers=servers,
                curvature=curvature,
                num_slots=staleness + 1,
                alike={"staleness": staleness},
            )
        except NodeMemoryError as error:  # on all ranks
            raise NodeMemoryError(
                f"{error}; or take a smaller staleness than {staleness}, for which each rank has "
                f"{staleness + 1} gradients there"
            ) from error

    def _make_server(self, *args: Any, **options: Any) -> ClockedServer:
        return ClockedServer(*args, bound=self.staleness, **options)

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        found = self._push(weight, gradients, reads=True)
        assert found <= self.staleness, (found, self.staleness)
