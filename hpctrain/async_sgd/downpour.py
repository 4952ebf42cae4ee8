"""``AsyncSGD`` and ``Downpour``: servers apply each gradient as it comes."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.async_method import AsyncMethod, Servers, require_number
from hpctrain.async_sgd.server import ImmediateServer, Read
from hpctrain.core.errors import ConfigError


class AsyncSGD(AsyncMethod):
    """Lets each worker send its gradient and go on with the values of that moment.

    Servers take the optimizer's step by each single gradient. A gradient's staleness is the
    number of updates by other workers between the reading of its values and its application, as
    ``staleness_histogram`` counts it; the learning rate is divided by it, so that what is old
    counts for less. With N workers N gradients are applied in the time of one synchronous step,
    each with a whole learning rate: take a smaller one than for a mean of N.

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
        """Give all ranks the model of rank 0, start the servers, hook the optimizer. Collective.

        Args:
            model: with equal parameters and buffers on every rank.
            optimizer: a plain one of torch that steps every element by itself; its state lies on
                the servers, its settings may differ between ranks.
            staleness_aware: divide the learning rate of a gradient by its staleness, where that
                is above 1.
            most_ahead: steps that a worker may be ahead of the slowest one; None for any number.
            servers: as for ``StaleSynchronous``.
            curvature: as for ``StaleSynchronous``.

        Raises:
            ConfigError: an argument is not valid; on every rank.
        """
        if most_ahead is not None:
            require_number("most_ahead", most_ahead, 0)
        bound = math.inf if most_ahead is None else most_ahead
        self._server_options: dict[str, Any] = {"scales_rate": staleness_aware, "bound": bound}
        super().__init__(
            model,
            optimizer,
            servers=servers,
            curvature=curvature,
            alike=[staleness_aware, most_ahead],
        )

    def _make_server(self, *args: Any, **options: Any) -> ImmediateServer:
        return ImmediateServer(*args, **self._server_options, **options)

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        self._push(weight, gradients, reads=True)


class Downpour(AsyncMethod):
    """Lets replicas train by themselves, and tell servers what they have seen now and then.

    Each step the optimizer steps this rank's replica, and the gradient is added to what has
    accrued. Every ``n_push`` steps that goes to the servers, which take a step of Adagrad by it
    as it comes; every ``n_fetch`` steps the replica is replaced by the servers' values. The
    squares that Adagrad sums lie on the servers, as asynchrony is stable by their rates.

    ``staleness_histogram`` counts, for each push, updates by others since the last fetch.

    Source: Dean et al. 2012, "Large scale distributed deep networks", NeurIPS, Algorithm 7.1.
    """

    _steps_here = True

    def __init__(  # noqa: PLR0913 - what a user may choose
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
        """Give all ranks the model of rank 0, start the servers, hook the optimizer. Collective.

        Args:
            model: with equal parameters and buffers on every rank.
            optimizer: what steps a replica between two fetches, a plain one of torch; its state
                is the replica's own.
            n_push: steps between two pushes.
            n_fetch: steps between two fetches.
            rate: learning rate of Adagrad on the servers.
            warmup_steps: steps of the first worker alone before the others take their first one.
            most_ahead: pushes that a worker may be ahead of the slowest one when it fetches; None
                for any number.
            servers: as for ``StaleSynchronous``.
            curvature: as for ``StaleSynchronous``.

        Raises:
            ConfigError: an argument is not valid; on every rank.
        """
        require_number("n_push", n_push, 1)
        require_number("n_fetch", n_fetch, 1)
        require_number("warmup_steps", warmup_steps, 0)
        if most_ahead is not None:
            require_number("most_ahead", most_ahead, 0)
        if not 0 < rate < math.inf:
            raise ConfigError(f"rate is a learning rate above 0, got {rate!r}")
        self._n_push, self._n_fetch = n_push, n_fetch
        bound = math.inf if most_ahead is None else most_ahead
        self._server_options: dict[str, Any] = {
            "warmup": -(-warmup_steps // n_push),
            "bound": bound,
        }
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        super().__init__(
            model,
            optimizer,
            servers=servers,
            curvature=curvature,
            alike=[n_push, n_fetch, rate, warmup_steps, most_ahead],
            server_optimizer=torch.optim.Adagrad(trained or [torch.zeros(1)], lr=rate),
        )
        self._num_steps = 0
        self._accrued: list[Tensor | None] = [None] * len(self._layout.parameters)
        self._joins = warmup_steps > 0 and self.is_worker and self.comm.rank != self.workers[0]
        if self._joins:
            self._hooks.append(model.register_forward_pre_hook(self._join))

    def _make_server(self, *args: Any, **options: Any) -> ImmediateServer:
        return ImmediateServer(*args, **self._server_options, **options)

    def _join(self, *_: object) -> None:
        """Wait until the first worker is warm, once."""
        if self._joins and self._client is not None:
            self._joins = False
            self._client.ask(Read(self._clock))

    @torch.no_grad()
    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        if self._joins:  # the gradient is of weights from before the warm-up
            self._join()
            return
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
        elif fetches and self._client is not None:
            self._client.ask(Read(self._clock))

    def _push_accrued(self, *, reads: bool) -> None:
        accrued, self._accrued = self._accrued, [None] * len(self._accrued)
        has_any = any(grad is not None for grad in accrued)
        self._push(float(has_any), accrued, reads=reads)

    def _before_settle(self) -> None:
        if any(grad is not None for grad in self._accrued):
            self._push_accrued(reads=False)
