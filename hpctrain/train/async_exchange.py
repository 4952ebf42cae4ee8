"""Combination of steps by asynchronous methods: ranks send updates to parameter servers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.async_sgd.downpour import AsyncSGD, Downpour
from hpctrain.async_sgd.stale_synchronous import StaleSynchronous
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.core.errors import MismatchError
from hpctrain.core.target import check_arguments
from hpctrain.train.local_exchange import OwnStepsExchange, naming
from hpctrain.train.model import BuiltModel
from hpctrain.train.run_config import RunConfig
from hpctrain.train.step_exchange import Figures
from hpctrain.train.sync_config import SyncConfig

SYNC_STEPS = 16
"""Number of steps between synchronizations; small, so that stop requests reach all ranks soon."""


_KINDS: Mapping[str, tuple[type[AsyncMethod], str]] = {
    "ssp": (StaleSynchronous, "staleness"),
    "downpour": (Downpour, "most_ahead"),
    "async": (AsyncSGD, "most_ahead"),
}
"""Class of each method, and the argument that receives ``sync.staleness``."""


class AsyncExchange(OwnStepsExchange):
    """Sends the updates of each rank to parameter servers, with a method such as ``ssp``.

    Every ``SYNC_STEPS`` steps, and after steps that ``begin`` marks with ``must_agree``, all ranks
    synchronize and combine their flags.

    Args:
        config: configuration of the run.
        comm: all ranks.
        built: identical model on all ranks, and a plain optimizer.
    """

    method: AsyncMethod
    raised_flags = 0  # flags of all ranks at the last synchronization
    gradient_flags = 0  # flags of this rank, as gradients are not averaged
    is_synchronous = False
    leads_step = True  # each rank counts its own steps
    replicas_agree = False

    def __init__(self, config: RunConfig, comm: Communicator, built: BuiltModel) -> None:
        with agreed(comm):
            method = _make_method(config.sync, built)
        super().__init__(config, comm, built, method.optimizer, method)
        method.is_compared = False  # finish() equalizes the models, so no check at exit is needed
        self._must_synchronize = False
        self._step = self._step_since_sync = 0
        self._figures: Figures = {"staleness": 0.0, "staleness_most": 0}
        self._counted = (0, 0)
        self._hook = method.optimizer.register_step_post_hook(lambda *_: self._end_step())

    def begin(self, rate: float, *, must_agree: bool) -> None:
        """Set the learning rates; if ``must_agree``, synchronize after the step. Local."""
        super().begin(rate, must_agree=must_agree)
        self._must_synchronize = must_agree

    @property
    def communication_seconds(self) -> float:
        """Seconds that the last step waited for servers."""
        return self.method.waited_s

    def raise_flags(self, flags: int) -> None:
        """Send the bits ``flags`` to all ranks at the next synchronization. Local."""
        self.gradient_flags = flags

    def _synchronize(self) -> None:
        """No-op: gradients are not combined."""

    def _set_num_passes(self, num_passes: int) -> None:
        """No-op: torch accumulates the gradients of several passes in ``.grad``."""

    def skip(self, flags: int) -> None:
        """Skip this rank's local step. Collective if ranks synchronize after this step."""
        super().skip(flags)
        self._end_step()

    @property
    def is_between_rounds(self) -> bool:
        """Whether the ranks have synchronized after the last step."""
        return self._step_since_sync == 0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Load the model of the servers on all ranks, for the block and afterwards. Collective."""
        self.finish()
        yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Return a context in which all ranks have the servers' parameters and optimizer state.

        Collective.
        """
        if self.replicas_agree:
            yield
            return
        with self.method.settled(shows_all=False):
            self.replicas_agree = True
            try:
                yield
            finally:
                self.replicas_agree = False

    @property
    def states_agree(self) -> bool:
        """Whether model and optimizer of all ranks must be equal now, as inside ``settled``."""
        return self.comm.size == 1 or self.replicas_agree

    def close(self) -> None:
        """Remove the hooks. Local."""
        self._hook.remove()
        super().close()

    @property
    def _has_own_optimizer(self) -> bool:
        """Whether ranks have an optimizer in addition to the optimizer of the servers."""
        return self.method.server_optimizer is not self.method.optimizer

    def _shared_optimizer(self) -> dict[str, Any]:
        state = super()._shared_optimizer()
        is_own = self._has_own_optimizer and self.comm.size > 1
        return {**state, "state": {}} if is_own else state

    def _method_shared_state(self) -> dict[str, Any]:
        server = self.method.server_optimizer.state_dict() if self._has_own_optimizer else None
        return {"step": self._step, "server": server}

    def _method_own_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict() if self._has_own_optimizer else None}

    def _restore_method(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        self._step = shared["step"]
        if shared.get("server"):
            self.method.server_optimizer.load_state_dict(shared["server"])
        self.method.reload()
        if own is not None and own.get("optimizer"):
            self.optimizer.load_state_dict(own["optimizer"])

    @property
    def facts(self) -> Figures:
        """Entries for the record that each start or resume of a run writes."""
        sync = self.config.sync
        return {"sync": {"method": sync.method, "staleness": sync.staleness}}

    @property
    def figures(self) -> Figures:
        """Staleness of updates at the last synchronization; identical on all ranks."""
        return self._figures

    def describe(self) -> list[tuple[str, str]]:
        """Return a row ``(title, text)`` about the method."""
        sync = self.config.sync
        return [("sync", f"{sync.method}, staleness {sync.staleness}")]

    def _end_step(self) -> None:
        self._step += 1
        self._step_since_sync += 1
        self.raised_flags = 0
        if self._must_synchronize or self._step % SYNC_STEPS == 0:
            self._synchronize_all()

    def _synchronize_all(self) -> None:
        """Synchronize all ranks, and combine flags and staleness. Collective."""
        histogram = self.method.staleness_histogram
        counted = sum(histogram.values()), sum(s * n for s, n in histogram.items())
        since = [now - before for now, before in zip(counted, self._counted, strict=True)]
        bits = [self.gradient_flags >> bit & 1 for bit in range(4)]
        flat = torch.tensor([*since, *bits, max(histogram, default=0), self._step, -self._step])
        sums = flat.double()
        self.comm.allreduce_(sums).wait()
        self.comm.allreduce_(flat, op=Op.MAX).wait()
        most, least = int(flat[-2]), -int(flat[-1])
        if most != least:
            raise MismatchError(
                f"all ranks must take the same number of steps, but this rank has taken "
                f"{self._step} and other ranks {least} to {most}; give every rank the "
                f"same number of batches"
            )
        self._counted = counted
        self.raised_flags = sum(1 << bit for bit in range(4) if sums[2 + bit])
        mean = float(sums[1] / sums[0]) if sums[0] else 0.0
        self._figures = {"staleness": mean, "staleness_most": int(flat[6])}
        self._must_synchronize, self._step_since_sync = False, 0


def _make_method(config: SyncConfig, built: BuiltModel) -> AsyncMethod:
    kind, name = _KINDS[config.method]
    args = {name: config.staleness, **config.args}
    check_arguments(kind, 2, args, "sync.args")
    make: Any = kind  # each class has other arguments, checked above
    with naming(config.method):
        made: AsyncMethod = make(built.model, built.optimizer, **args)
    return made
