"""``PostLocalSGD``: synchronous while the learning rate is high, local after it has dropped."""

from itertools import zip_longest
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.local_method import SWITCH
from hpctrain.local_sgd.local_sgd import LocalSGD
from hpctrain.local_sgd.rounds import Fields, Steps

DROP = 0.5  # a learning rate has dropped when it is at most this part of the highest so far


class PostLocalSGD(LocalSGD):
    """Averages gradients in every step first, and parameters in rounds later.

    Source: Lin et al. 2020, arXiv:1808.07217, which switches at the first drop of the learning
    rate. torch's ``PostLocalSGDOptimizer`` with ``PeriodicModelAverager`` takes the same steps.
    """

    _SHARED: ClassVar[Fields] = {"is_local": "_is_local", "highest": "_highest"}

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: Steps = 8,
        *,
        start: int | str = "lr_drop",
        **options: Any,
    ) -> None:
        """Give all ranks the model of rank 0 and hook the optimizer. Collective.

        Args:
            model: as for ``LocalSGD``.
            optimizer: as for ``LocalSGD``.
            steps: of a round, as for ``LocalSGD``.
            start: number of synchronous steps; or ``"lr_drop"``: until a step after that in which
                the learning rate of a group is at most half of its highest.
            options: the others of ``LocalSGD``.

        Raises:
            ConfigError: an argument is not valid.
        """
        if not (start == "lr_drop" or (isinstance(start, int) and start >= 0)):
            raise ConfigError(f'start is a number of steps or "lr_drop", got {start!r}')
        super().__init__(model, optimizer, steps, **options)
        self._start = start
        self._highest = [0.0 for _ in optimizer.param_groups]
        self._reducer = self._reducer_over(self._comm)
        self._go(is_local=start == 0)

    @property
    def facts(self) -> dict[str, Any]:
        """Figures for people and records; see ``LocalMethod``."""
        return {**super().facts, "phase": "local" if self._is_local else "synchronous"}

    def _start_again(self) -> None:
        super()._start_again()
        self._go(is_local=self._is_local)

    def _after_step(self) -> None:
        if self._is_local:
            super()._after_step()
            return
        self.rounds.start_here()
        self._samples[0].clear()
        if self._has_ended():
            self._go(is_local=True)

    def _go(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self.replica.all_agree()
        if self._reducer is not None:
            self._reducer.is_on = not is_local

    def _has_ended(self) -> bool:
        """Say whether the synchronous steps are over: the same on every rank.

        A rank that sees a drop raises a flag, which all ranks have with the next step.
        """
        if isinstance(self._start, int):
            return self.rounds.step >= self._start
        seen = self._wants_switch
        if self._reducer is not None:
            seen = bool(self._reducer.steps.raised_flags & SWITCH)
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        pairs = zip_longest(rates, self._highest[: len(rates)], fillvalue=0.0)  # more groups came
        self._highest = [max(pair) for pair in pairs]
        both = zip(rates, self._highest, strict=True)
        self._wants_switch |= any(rate <= DROP * highest for rate, highest in both)
        self._raise()
        return seen
