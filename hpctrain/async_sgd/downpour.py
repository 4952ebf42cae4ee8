"""``AsyncSGD`` and ``Downpour``: servers apply each gradient on arrival."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.async_sgd.requirements import Servers, bound_of
from hpctrain.async_sgd.server import ParameterServer, renumbered
from hpctrain.async_sgd.server_messages import Push, Read
from hpctrain.core.checks import Amount, Count, Number, checked

_OF_SERVER = "server_"  # prefix of server entries in the state of the rank's optimizer
_LOST = -1  # key for the number of updates by all lost workers


class AsyncSGD(AsyncMethod):
    """Sends gradients to servers, which apply each gradient on arrival and return current values.

    The servers take one optimizer step per gradient. The staleness of a gradient is the number of
    updates by other workers between the time at which the worker read the values and the time at
    which its gradient is applied. The servers divide the learning rate by the staleness, and
    ``staleness_histogram`` counts the gradients of each staleness. N workers apply N gradients in
    the time of one synchronous step, each with the whole learning rate, so use a smaller learning
    rate than for a mean of N gradients.

    Gradients may arrive at several servers in different orders, so each server uses the staleness
    in its own shard, and the histogram counts the largest staleness. With ``servers=1`` all
    parameters of a gradient have the same staleness.

    The constructor is collective: it broadcasts the model of rank 0, starts the servers and hooks
    the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: a plain torch optimizer that updates each element independently; the servers
            store the state, and the options may differ between ranks.
        staleness_aware: whether the learning rate is divided by the staleness of the gradient
            if the staleness is above 1.
        most_ahead: number of steps by which a worker may be ahead of the slowest worker; None for
            no limit.
        servers: as for ``StaleSynchronous``.
        curvature: as for ``StaleSynchronous``.

    Raises:
        ConfigError: an argument is not valid; on every rank.

    Source: Zhang et al. 2016, "Staleness-aware async-SGD for distributed deep learning", IJCAI.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        staleness_aware: bool = True,
        most_ahead: int | None = None,
        servers: Servers = None,
        curvature: float | None = None,
    ) -> None:
        bound = bound_of(most_ahead)
        super().__init__(
            model,
            optimizer,
            make_server=partial(ImmediateServer, scales_rate=staleness_aware, bound=bound),
            servers=servers,
            curvature=curvature,
            same={"staleness_aware": staleness_aware, "most_ahead": most_ahead},
        )

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        self._push(weight, gradients, reads=True)


class Downpour(AsyncMethod):
    """Trains a replica on each rank; periodically sends gradients to servers and reads values.

    In each step the optimizer updates this rank's replica, and the gradient is accumulated. Every
    ``n_push`` steps the rank sends the accumulated gradient to the servers, which take an Adagrad
    step on arrival; every ``n_fetch`` steps the rank replaces its replica by the servers' values.
    Adagrad's per-element learning rates keep asynchronous training stable. Inside ``settled()``
    the state of the optimizer contains Adagrad's sums of squares as ``server_sum``. If a saved
    optimizer state with these sums is loaded before a new ``Downpour`` is made, or before
    ``reload()``, training continues with the sums, without another warm-up.

    ``staleness_histogram`` counts, per push, the updates by other workers since the last fetch.

    The constructor is collective: it broadcasts the model of rank 0, starts the servers and hooks
    the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: a plain torch optimizer that updates the replica between two fetches; each rank
            has its own state.
        n_push: number of steps between two sends of gradients.
        n_fetch: number of steps between two reads of values.
        rate: learning rate of Adagrad on the servers.
        warmup_steps: number of steps that the first worker takes alone. The other workers wait in
            their first forward pass. If the loss of a worker does not call ``model``, the worker
            waits in its first step, after it has computed a gradient of the initial values.
        most_ahead: number of sends by which a worker that reads values may be ahead of the slowest
            worker; None for no limit.
        servers: as for ``StaleSynchronous``.
        curvature: as for ``StaleSynchronous``.

    Raises:
        ConfigError: an argument is not valid; on every rank.

    Source: Dean et al. 2012, "Large scale distributed deep networks", NeurIPS, Algorithm 7.1.
    """

    _steps_here = True
    _joins = False  # whether this rank still has to wait for the warm-up of the first worker
    _num_steps = 0

    def __init__(  # noqa: PLR0913 - keyword options of users
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        n_push: int = 1,
        n_fetch: int = 1,
        rate: float = 0.01,
        warmup_steps: int = 0,
        most_ahead: int | None = None,
        servers: Servers = None,
        curvature: float | None = None,
    ) -> None:
        numbers = {"n_push": n_push, "n_fetch": n_fetch, "warmup_steps": warmup_steps}
        for name, number in numbers.items():
            checked(name, number, Count if name == "warmup_steps" else Number)
        checked("rate", rate, Amount)
        self._n_push, self._n_fetch, self._rate = n_push, n_fetch, rate
        bound, warmup = bound_of(most_ahead), -(-warmup_steps // n_push)  # in pushes
        super().__init__(
            model,
            optimizer,
            make_server=partial(ImmediateServer, bound=bound, warmup=warmup),
            servers=servers,
            curvature=curvature,
            same=numbers | {"rate": rate, "most_ahead": most_ahead},
        )
        self._accrued: list[Tensor | None] = [None] * len(self._layout.parameters)
        if warmup_steps and not self._is_resumed and self.comm.rank in self.workers[1:]:
            self._joins = True
            self._hooks.add(model.register_forward_pre_hook(self._join))

    def _optimizer_of_servers(self, parameters: list[Tensor]) -> Optimizer:
        return torch.optim.Adagrad(parameters, lr=self._rate)

    def _join(self, *_: object) -> None:
        """Wait until the first worker has finished the warm-up; no-op after the first call."""
        if self._joins:
            self._require_untouched()
            self._wait_for_warmup()

    def _wait_for_warmup(self) -> None:
        if self._joins:
            self._joins = False
            self._send_and_wait(Read(self._clock))

    @torch.no_grad()
    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        # The first forward of the model waits; if the loss does not call the model, wait here.
        self._wait_for_warmup()
        self._num_steps += 1
        for number, grad in enumerate(gradients):
            if grad is None or not weight:
                continue
            dense, before = grad.to_dense() if grad.is_sparse else grad, self._accrued[number]
            if before is None:
                self._accrued[number] = dense * weight
            else:
                before.add_(dense, alpha=weight)
        fetches = self._num_steps % self._n_fetch == 0
        if self._num_steps % self._n_push == 0:
            self._push_accrued(reads=fetches)
        elif fetches:
            self._send_and_wait(Read(self._clock))

    def _push_accrued(self, *, reads: bool) -> None:
        accrued, self._accrued = self._accrued, [None] * len(self._accrued)
        has_any = any(grad is not None for grad in accrued)
        self._push(float(has_any), accrued, reads=reads)

    def _before_settle(self) -> None:
        if any(grad is not None for grad in self._accrued):
            self._push_accrued(reads=False)

    # -- state of the servers in the optimizer of this rank -------------------------------------

    def _show_state(self) -> None:
        for p in self._layout.parameters:
            if kept := self.server_optimizer.state.get(p):
                shown = {_OF_SERVER + name: value for name, value in kept.items()}
                shown[_OF_SERVER + "step"] = float(
                    kept["step"]
                )  # load_state_dict would cast a tensor
                # A new dictionary, so that a saved state does not change.
                self.optimizer.state[p] = {**self.optimizer.state.get(p, {}), **shown}

    def _take_state(self) -> None:
        for p in self._layout.parameters:
            state = self.server_optimizer.state[p] or {"step": 0.0, "sum": torch.zeros_like(p)}
            state |= self._pop_shown(p)
            state["step"] = torch.tensor(float(state["step"]))
            self.server_optimizer.state[p] = state
        states = self.server_optimizer.state.values()
        self._is_resumed = any(state["step"] > 0 for state in states)

    def _forget_state(self) -> None:
        super()._forget_state()
        for p in self._layout.parameters:
            self._pop_shown(p)

    def _pop_shown(self, p: Tensor) -> dict[str, Any]:
        state = self.optimizer.state.get(p, {})
        shown = {k: v for k, v in state.items() if k.startswith(_OF_SERVER)}
        if shown:
            self.optimizer.state[p] = {k: v for k, v in state.items() if k not in shown}
            if not self.optimizer.state[p]:
                del self.optimizer.state[p]
        return {k.removeprefix(_OF_SERVER): v for k, v in shown.items()}

    def _load(self) -> None:
        """Load this rank's server; skip the warm-up if Adagrad's sums of squares were loaded."""
        super()._load()
        if self._is_resumed:
            self._joins = False
            if self._server is not None:
                self._server.warmup = 0


class ImmediateServer(ParameterServer):
    """Parameter server that applies each gradient on arrival.

    Args:
        *args: as for ``ParameterServer``.
        scales_rate: whether learning rates are divided by the staleness of the gradient.
        **options: as for ``ParameterServer``.
    """

    def __init__(self, *args: Any, scales_rate: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scales_rate = scales_rate
        self._num_updates = Counter[int]()  # number of updates by each worker
        self._total = 0  # sum of ``_num_updates``
        self._seen = Counter[int]()
        """By worker, the number of other workers' updates in the values that it has read last."""
        self._staleness = Counter[int]()  # staleness of the last gradient of each worker

    def _push(self, source: int, push: Push) -> int:
        staleness = self._updates_of_others(source) - self._seen[source]
        settings = push.settings
        if self._scales_rate and staleness > 1:
            settings = [{**one, "lr": one["lr"] / staleness} for one in settings]
        if push.weight:
            self.shard.step([push], settings)
            self._num_updates[source] += 1
            self._total += 1
        self._staleness[source] = staleness
        return staleness

    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> int:
        del clock
        self._seen[source] = self._updates_of_others(source)
        self.shard.copy_to(out)
        return self._staleness[source]

    def _renumber(self, numbers: Mapping[int, int]) -> None:
        for counts in (self._num_updates, self._seen, self._staleness):
            left = renumbered(counts, numbers)
            counts.clear()
            counts.update(left)
        # The values contain updates of lost workers.
        self._num_updates[_LOST] = self._total - self._num_updates.total()

    def _updates_of_others(self, worker: int) -> int:
        return self._total - self._num_updates[worker]
