"""``StaleSynchronous``: workers may be some steps apart, and no more."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.async_sgd.requirements import Servers
from hpctrain.async_sgd.server import ParameterServer, Push, copied, renumbered
from hpctrain.core.checks import Count, checked
from hpctrain.core.errors import MismatchError, NodeMemoryError


class StaleSynchronous(AsyncMethod):
    """Lets a worker be up to ``staleness`` steps ahead of the slowest one.

    Before its step c (counted from 0) a worker has values with the updates of all workers' steps
    up to c - staleness - 1, its own of all steps before c, and of those of others what has come;
    none of step c or later. An update is the optimizer's step by the mean gradient of all workers
    in one step, summed in rank order on each node. What is read ahead of the slowest worker is
    stepped by what has come of the steps before c; once a step is complete it counts as a whole.

    So with ``staleness=0`` this is synchronous SGD, for any optimizer: ``DistributedOptimizer`` to
    the bit on one node and on two, of more the order of sums is another. A slow moment of one
    worker is hidden up to ``staleness`` steps; a worker that is always slow is not.

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
                gradients and one more in node memory, and the values.
            servers: None for all ranks, each of which has a part of the parameters and works,
                too; a number of dedicated ranks, the last ones; or a list of them.
            curvature: largest eigenvalue of the Hessian, if known: then a warning says where the
                learning rate is too large for the staleness that is met.

        Raises:
            ConfigError: an argument is not valid; on every rank.
        """
        checked("staleness", staleness, Count)
        self.staleness = staleness
        try:
            super().__init__(
                model,
                optimizer,
                make_server=partial(ClockedServer, bound=staleness),
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

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        found = self._push(weight, gradients, reads=True)
        assert found <= self.staleness, (found, self.staleness)


class ClockedServer(ParameterServer):
    """Applies the mean of a clock once all workers have told it.

    Who reads ahead of the slowest gets values that were stepped further, on a copy, by what has
    come of the clocks before its own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what ``ParameterServer`` takes."""
        super().__init__(*args, **options)
        self._applied = 0  # clocks that are complete and in the values
        self._told: defaultdict[int, dict[int, Push]] = defaultdict(dict)

    def _push(self, source: int, push: Push) -> int:
        told = self._told[push.clock]
        for other, known in [*told.items()][:1]:  # the others are like that one
            if known.kind != push.kind:
                raise MismatchError(
                    f"all workers take a step with the same settings, in step {push.clock} those "
                    f"of rank {source} differ from those of rank {other}: {push.kind:.300} and "
                    f"{known.kind:.300}; change learning rates after the same step on every rank"
                )
            if known.weight and push.weight and known.is_counted != push.is_counted:
                raise MismatchError(
                    f"all workers say how many samples their gradients are of, or none does, in "
                    f"step {push.clock} only one of ranks {other} and {source} has; call "
                    f"set_num_samples() on every rank"
                )
        told[source] = push
        return 0

    def _after_clock(self) -> None:
        least = min(self._clocks.values(), default=math.inf)
        while self._applied < least and self._applied in self._told:
            self._apply(self._applied, 0)
            del self._told[self._applied]
            self._applied += 1

    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> int:
        del source
        self._copy_to(out)
        held, state = self._held, self._stepper.state
        try:
            if clock > self._applied:
                self._held = self._tensors_in(out)
                self._stepper.state = defaultdict(dict)
                for tensor, before in zip(self._held, held, strict=True):
                    if before in state:
                        self._stepper.state[tensor] = copied(state[before])
            for ahead in range(self._applied, clock):
                self._apply(ahead, sum(other <= ahead for other in self._clocks.values()))
        finally:
            self._held, self._stepper.state = held, state
        return clock - self._applied

    def _begin(self, clock: int) -> None:
        self._applied = clock
        self._told.clear()

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        told = {clock: renumbered(told, numbers) for clock, told in self._told.items()}
        self._told = defaultdict(dict, {clock: left for clock, left in told.items() if left})

    def _apply(self, clock: int, num_missing: int) -> None:
        pushes = [push for _, push in sorted(self._told[clock].items())]
        self._step(pushes, pushes[0].settings, num_missing)
