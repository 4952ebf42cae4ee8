"""``StagedSGD``: cycles of local steps between a synchronous warm-up and cool-down."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from hpctrain.compress.by_name import Compressing
from hpctrain.core.checks import Count, Decay, Number, checked, require
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.local_sgd.state_fields import Fields


class StagedSGD(LocalMethod):
    """Averages gradients over all ranks in warm-up and cool-down, else inside each node.

    Between warm-up and cool-down the ranks of a node average gradients. Every ``steps`` steps all
    nodes send their parameters, and ``delay`` steps later each node merges the mean: with P nodes
    and a delay of W steps θ <- (2 W θ + P mean) / (2 W + P). If the loss stops falling, steps and
    delay are halved. If the loss does not fall even with one step, steps and delay return to their
    initial values. On a single node all steps are synchronous.

    Floating-point buffers are averaged with the parameters. Optimizer states differ between nodes,
    and are averaged once before the cool-down, since ranks with different momenta diverge.

    The constructor is collective: it broadcasts the model of rank 0 and hooks the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: plain torch optimizer of the model's parameters.
        warmup_steps: synchronous steps at the start.
        cooldown_start: index of the first step of the cool-down, from 0.
        steps: largest number of steps between two exchanges.
        delay: steps between the send of parameters and the merge of their mean, at most
            ``steps``; None for a quarter of ``steps``, at least 1; 0 for no delay.
        patience: consecutive calls of ``observe`` without a lower loss, after which steps and
            delay change.
        threshold: fraction by which a loss must be below the lowest loss to count as lower.
        compression: codec of the tensors that are sent between all ranks.

    Raises:
        ConfigError: an argument is not valid.

    Source: Coquelin et al. 2022, J. Big Data 9:14 (DASO). Differs: nodes may have different
    numbers of ranks; every rank of a node sends one slice of the parameters; the ranks of a node
    average gradients in every step.
    """

    _SHARED: ClassVar[Fields] = {"cycle": ("_steps", "_delay", "_best", "_num_bad")}
    _OWN: ClassVar[Fields] = {"under_way": "_averagings[]", "due": ("_due", "_waits")}

    def __init__(  # noqa: PLR0913 - keyword options of users
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        warmup_steps: int,
        cooldown_start: int,
        steps: int = 8,
        delay: int | None = None,
        patience: int = 2,
        threshold: float = 0.05,
        compression: Compressing | None = None,
    ) -> None:
        delay = max(1, steps // 4) if delay is None else delay
        checked("warmup_steps", warmup_steps, Count)
        rule = f"warmup_steps must be at most {cooldown_start=}"
        require(warmup_steps <= cooldown_start, rule, warmup_steps, "use fewer warm-up steps")
        checked("steps", steps, Number)
        require(0 <= delay <= steps, f"delay must be from 0 to {steps=}", delay, "leave delay out")
        checked("patience", patience, Number)
        checked("threshold", threshold, Decay)
        super().__init__(model, optimizer, compression=compression)
        self._warmup_steps, self._cooldown_start = warmup_steps, cooldown_start
        self._most_steps, self._most_delay = steps, delay
        self._patience, self._threshold = patience, threshold
        self._steps, self._delay = steps, delay
        # Step after which the exchange in flight is merged, and delay of that exchange.
        self._due, self._waits = 0, delay
        self._best, self._num_bad = float("inf"), 0
        self._everywhere = self._synchronous.over(self._comm)
        self._on_node = None
        self._averagings = []
        if self._topology.num_nodes > 1:
            self._on_node = self._synchronous.over(self._exchange.node)
            self._averagings.append(self._exchange.averages_parameters())
            self._averagings.append(self._exchange.averages_buffers())
        self._set_phase()

    @property
    def facts(self) -> dict[str, Any]:
        """Human-readable figures; see ``LocalMethod``."""
        return {
            **super().facts,
            "steps": self._steps if self._is_cycling else 1,
            "delay": self._delay if self._is_cycling else 0,
            "phase": "cycling" if self._is_cycling else "synchronous",
        }

    def observe(self, loss: float) -> None:
        """Adapt steps and delay to the mean of ``loss`` over all ranks. Collective."""
        self._require_open()
        self._synchronous.confirm()
        mean = torch.tensor(loss, dtype=torch.float64)
        self._comm.allreduce_(mean, scale=1.0 / self._comm.size).wait()
        if not self._is_cycling:
            return
        has_fallen = mean.item() < self._best * (1.0 - self._threshold)
        self._num_bad = 0 if has_fallen else self._num_bad + 1
        self._best = min(self._best, mean.item())
        if self._num_bad < self._patience:
            return
        self._num_bad = 0
        if self._steps > 1:
            self._steps //= 2
            self._delay = min(-(-self._most_delay * self._steps // self._most_steps), self._steps)
        else:
            self._steps, self._delay = self._most_steps, self._most_delay

    def _start_again(self) -> None:
        super()._start_again()
        self._set_phase()

    @property
    def _is_cycling(self) -> bool:
        return self._cycles_in(self.rounds.step)

    def _cycles_in(self, step: int) -> bool:
        """Return whether the step after ``step`` is between warm-up and cool-down."""
        several = self._topology.num_nodes > 1
        return several and self._warmup_steps <= step < self._cooldown_start

    def _after_step(self) -> None:
        was_cycling = self._cycles_in(self.rounds.step - 1)
        if self.rounds.step >= self._due:
            self._take_over()
        if was_cycling and not self._is_cycling:
            self._end_round()
        elif was_cycling and self.rounds.step_in_round >= self._steps:
            self._send()
        elif not was_cycling:
            self.rounds.start_here()
            self._samples[0].clear()
            if self._is_cycling:
                self.replica.all_agree()
        self._set_phase()

    def _send(self) -> None:
        """Start an exchange of replicas between all nodes. Collective."""
        self._take_over()
        opening = self._exchange.begin(self._averagings, self._samples[0])
        self._due, self._waits = self.rounds.step + self._delay, self._delay
        if not self._delay:
            self._take_over()
        self.rounds.close(agrees=opening.total_weight > 0 and not self._delay)

    def _end_round(self) -> None:
        self._take_over()
        state = self._exchange.averages_state()
        opening = self._exchange.begin([*self._averagings, state], self._samples[0])
        self._exchange.complete([*self._averagings, state])
        self.rounds.close(agrees=opening.total_weight > 0)

    def _take_over(self) -> None:
        """Merge the result of the exchange in flight, if any, with this rank's parameters."""
        own = 2 * self._waits
        self._exchange.complete(self._averagings, keep=own / (own + self._topology.num_nodes))

    def _set_phase(self) -> None:
        for reducer, is_on in (
            (self._everywhere, not self._is_cycling),
            (self._on_node, self._is_cycling),
        ):
            if reducer is not None:
                reducer.switch(is_on=is_on)
