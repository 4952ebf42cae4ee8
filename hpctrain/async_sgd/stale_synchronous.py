"""``StaleSynchronous``: a worker may be a bounded number of steps ahead of the others."""

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

    Before step c (counted from 0), the values of a worker include

    - the gradients of all workers in the steps up to c - staleness - 1,
    - the gradients of this worker in all steps before c,
    - the gradients of other workers in steps before c that the servers have received.

    The values never include gradients of step c or later. The servers take one optimizer step for
    each step of the workers, by the mean gradient of all workers, summed in rank order on each
    node, after the last gradient of the step has arrived. A worker that is ahead of the slowest
    worker reads a copy of the values, on which the servers have taken the incomplete steps, too:
    in these steps, missing gradients count as zeros.

    With ``staleness=0`` the method is synchronous SGD, for any elementwise optimizer. The results
    are bitwise equal to ``DistributedOptimizer`` on one and two nodes; on more nodes sums have
    another order. A worker that is delayed by up to ``staleness`` steps does not delay the other
    workers; a worker that is always slow does.

    Gradients are sent in ``step()``, so gradient clipping before ``step()`` acts on each rank's
    gradient, not on the mean as in synchronous SGD.

    ``staleness_histogram`` counts, per read of values, the preceding steps that were incomplete.

    The constructor is collective: it broadcasts the model of rank 0, starts the servers and hooks
    the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: a plain torch optimizer that updates each element independently, with the same
            options on every rank in each step. The servers store the state.
        staleness: number of steps by which a worker may be ahead of the slowest worker. Each rank
            stores ``staleness + 1`` gradients and the values in node memory.
        servers: ranks that store the parameters: a number of dedicated ranks, which are the last
            ranks, or a list of dedicated ranks. With None all ranks are workers, and in a world of
            N ranks about 4 log2(N) ranks, at most N, also serve.
        curvature: largest eigenvalue of the Hessian, to warn if the learning rate is too large
            for the observed staleness; None for no warning.

    Raises:
        ConfigError: an argument is not valid; on every rank.

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
                f"{error}; with staleness={staleness} each rank stores {staleness + 1} gradients "
                f"in node memory, so a smaller staleness needs less memory"
            ) from error

    @property
    def _num_slots(self) -> int:  # type: ignore[override]
        return self.staleness + 1

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        found = self._push(weight, gradients, reads=True)
        assert found <= self.staleness, (found, self.staleness)


class ClockedServer(ParameterServer):
    """Parameter server that applies the mean gradient of a step when all gradients have arrived.

    A worker that is ahead of the slowest worker reads a copy of the values. The received gradients
    of incomplete steps are applied to this copy.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._applied = 0  # complete steps, which the values include
        self._pushed: defaultdict[int, dict[int, Push]] = defaultdict(dict)

    def _push(self, source: int, push: Push) -> int:
        pushed = self._pushed[push.clock]
        for other, first in [*pushed.items()][:1]:  # each later push was compared with the first
            if first.kind != push.kind:
                raise MismatchError(
                    "all workers must take a step with the same settings of the optimizer, but "
                    f"in step {push.clock} rank {source} has {push.kind:.300} and rank {other} "
                    f"has {first.kind:.300}; change learning rates after the same step on every "
                    "rank"
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
        while self._applied < self._clocks.least and self._applied in self._pushed:
            self._apply(self._applied, 0)
            del self._pushed[self._applied]
            self._applied += 1

    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> int:
        del source
        self.shard.copy_to(out)
        if clock > self._applied:
            with self.shard.on_copy(out):
                for ahead in range(self._applied, clock):
                    self._apply(ahead, self._clocks.num_up_to(ahead))
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
