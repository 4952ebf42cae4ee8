"""``LocalSGD``: every rank takes H steps of its own, then all take the mean of what they found."""

from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hpctrain.compress.by_name import Compressing
from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.local_sgd.rounds import Fields, Steps, SyncInterval

STATES = ("local", "average", "reset")


class LocalSGD(LocalMethod):
    """Averages parameters over all ranks after every ``steps`` steps instead of gradients in each.

    With ``steps=1`` and plain SGD, or SGD with momentum whose state is averaged too, this is
    synchronous SGD: the mean of steps is the step by the mean. With Adam it is not, since the
    mean of normalised steps is another one. Learning rates are those of one rank's batch.

    Buffers that have a mean, such as BatchNorm's statistics, are averaged with the parameters;
    BatchNorm's counters stay, being equal where all ranks take all steps.

    Federated averaging (McMahan et al. 2017, arXiv:1602.05629) is this with ``set_num_samples``
    and ``take_part``.

    Source: Stich 2019, arXiv:1805.09767, Algorithm 1; with the last iterate, not a weighted mean
    of all.
    """

    _SHARED: ClassVar[Fields] = {"pace": "_pace"}
    _OWN: ClassVar[Fields] = {"averagings": "_averagings[]"}

    def __init__(  # noqa: PLR0913 - what a user may choose
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: Steps = 8,
        *,
        state: str = "local",
        share: float = 0.1,
        most: int = 512,
        compression: Compressing | None = None,
    ) -> None:
        """Give all ranks the model of rank 0 and hook the optimizer. Collective.

        Args:
            model: with equal parameters and buffers on every rank.
            optimizer: a plain one of torch, which has the model's parameters.
            steps: of a round: a number; a function from the number of the round, counted from 0;
                or ``"auto"``: measured, so that averaging takes at most ``share`` of the time.
            state: of the optimizer, when replicas are averaged. ``local``: each rank keeps its
                own, as it belongs to the gradients that it sees; nothing more travels, and torch,
                post-local SGD and DiLoCo do so. ``average``: averaged too, which costs as many
                bytes again for each kind of state and makes ``steps=1`` exact for momentum.
                ``reset``: forgotten, for a state that no longer fits after a long round.
            share: largest part of the time for averaging, with ``auto``.
            most: largest number of steps, with ``auto``.
            compression: what parameters travel as; then it is their changes since the last round
                that travel, and a copy of the model is held, once per node.

        Raises:
            ConfigError: an argument is not valid.
        """
        if state not in STATES:
            raise ConfigError(f"state is one of {', '.join(STATES)}, got {state!r}")
        self._pace = SyncInterval(steps, share=share, most=most)
        super().__init__(model, optimizer, compression=compression)
        self._state = state
        self._averagings = [
            self._exchange.averages_parameters(),
            self._exchange.averages_buffers(),
        ]
        if state == "average":
            self._averagings.append(self._exchange.averages_state())

    @property
    def facts(self) -> dict[str, Any]:
        """Figures for people and records; see ``LocalMethod``."""
        return {**super().facts, "steps": self._pace.steps_of(self.rounds.number)}

    def _after_step(self) -> None:
        if self.rounds.step_in_round >= self._pace.steps_of(self.rounds.number):
            self._end_round()

    def _end_round(self) -> None:
        opening = self._exchange.begin(self._averagings, self._samples[0])
        self._exchange.complete(self._averagings)
        if self._state == "reset":
            self.replica.reset_state()
        self._pace.learn(opening.step_s, opening.round_s)
        self.rounds.close(agrees=opening.total_weight > 0)
