"""``StaleSynchronous``: workers may be a bounded number of steps apart."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.async_sgd.requirements import Servers
from hpctrain.async_sgd.server import ParameterServer, renumbered
from hpctrain.async_sgd.server_messages import Push
from hpctrain.core.checks import Count, checked
from hpctrain.core.errors import MismatchError, NodeMemoryError


class StaleSynchronous(AsyncMethod):
    """Allows a worker to be up to ``staleness`` steps ahead of the slowest worker.

    Before its step c (counted from 0) a worker has values with the updates of all workers' steps
    up to c - staleness - 1, of its own steps before c, and of those steps of other workers before
    c that the servers have received; never of step c or later. An update is the optimizer's step
    by the mean gradient of all workers in one step, summed in rank order on each node. Values that
    are read ahead of the slowest worker include steps by incomplete means; after the last gradient
    of a step has arrived, the step is taken once by the whole mean.

    With ``staleness=0`` this is synchronous SGD, for any optimizer. It has the bits of
    ``DistributedOptimizer`` on one node and on two; on more nodes sums have another order. Short
    delays of one worker are hidden up to ``staleness`` steps; a worker that is always slow is not.

    Gradients are sent in ``step()``: clipping before it acts on each rank's gradient, not on the
    mean as in synchronous SGD.

    ``staleness_histogram`` counts, for each read, the steps before it that were not complete.

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
        """Broadcast the model of rank 0, start the servers, and add hooks. Collective.

        Args:
            model: with equal parameters and buffers on every rank.
            optimizer: a plain optimizer of torch that steps each element separately, with the
                same settings on every rank in each step. The servers store its state.
            staleness: steps that a worker may be ahead of the slowest one. Each rank has
                ``staleness + 1`` gradients in node memory, and the values.
            servers: None for all ranks, each of which serves a shard of the parameters and is a
                worker; a number of dedicated ranks, the last ones; or a list of ranks.
            curvature: largest eigenvalue of the Hessian, if known: a warning reports a learning
                rate that is too large for the observed staleness.

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
                same={"staleness": staleness},
            )
        except NodeMemoryError as error:  # on all ranks
            raise NodeMemoryError(
                f"{error}; or take a smaller staleness than {staleness}, for which each rank has "
                f"{staleness + 1} gradients in node memory"
            ) from error

    @property
    def _num_slots(self) -> int:  # type: ignore[override]
        return self.staleness + 1

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        found = self._push(weight, gradients, reads=True)
        assert found <= self.staleness, (found, self.staleness)


class ClockedServer(ParameterServer):
    """Parameter server that applies the mean gradient of a clock when all workers have sent it.

    A worker that is ahead of the slowest one reads a copy of the values, to which the gradients
    received for the clocks before its own are applied.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Pass all arguments to ``ParameterServer``."""
        super().__init__(*args, **options)
        self._applied = 0  # clocks that are complete and in the values
        self._pushed: defaultdict[int, dict[int, Push]] = defaultdict(dict)

    def _push(self, source: int, push: Push) -> int:
        pushed = self._pushed[push.clock]
        for other, first in [*pushed.items()][:1]:  # the others were compared with it
            if first.kind != push.kind:
                raise MismatchError(
                    f"all workers must take a step with the same settings, but in step "
                    f"{push.clock} rank {source} has {push.kind:.300} and rank {other} has "
                    f"{first.kind:.300}; change learning rates after the same step on every rank"
                )
            if first.weight and push.weight and first.is_counted != push.is_counted:
                raise MismatchError(
                    f"set_num_samples() must be called by all workers or by none, but before step "
                    f"{push.clock} only one of ranks {other} and {source} has called it; call "
                    f"set_num_samples() on every rank"
                )
        pushed[source] = push
        return 0

    def _after_clock(self) -> None:
        least = min(self._clocks.values(), default=math.inf)
        while self._applied < least and self._applied in self._pushed:
            self._apply(self._applied, 0)
            del self._pushed[self._applied]
            self._applied += 1

    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> int:
        del source
        self.shard.copy_to(out)
        if clock > self._applied:
            with self.shard.on_copy(out):
                for ahead in range(self._applied, clock):
                    self._apply(ahead, sum(other <= ahead for other in self._clocks.values()))
        return clock - self._applied

    def _begin(self, clock: int) -> None:
        self._applied = clock
        self._pushed.clear()

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        kept = {clock: renumbered(pushed, numbers) for clock, pushed in self._pushed.items()}
        self._pushed = defaultdict(dict, {clock: by for clock, by in kept.items() if by})

    def _apply(self, clock: int, num_missing: int) -> None:
        pushes = [push for _, push in sorted(self._pushed[clock].items())]
        self.shard.step(pushes, pushes[0].settings, num_missing)
