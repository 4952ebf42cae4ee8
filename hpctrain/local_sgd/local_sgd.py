"""Methods whose ranks take several local steps and then average their parameters.

``LocalSGD`` averages over all ranks, ``HierarchicalLocalSGD`` more often inside a node, and
``PostLocalSGD`` after a synchronous phase.
"""

from itertools import zip_longest
from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from hpctrain.compress.by_name import Compressing
from hpctrain.core.checks import Count, Number, checked
from hpctrain.local_sgd.federated import Federated
from hpctrain.local_sgd.local_method import SWITCH, LocalMethod
from hpctrain.local_sgd.replica_weight import SampleSums
from hpctrain.local_sgd.round_clock import RoundClock
from hpctrain.local_sgd.rounds import Rounds
from hpctrain.local_sgd.state_fields import Fields
from hpctrain.local_sgd.sync_interval import Steps, SyncInterval


class LocalSGD(LocalMethod):
    """Averages parameters over all ranks every ``steps`` steps, instead of gradients in each step.

    With ``steps=1`` and plain SGD, or SGD with momentum and ``state="average"``, the method is
    synchronous SGD: the average of parameters after one step equals one step by the average of
    gradients. This does not hold for Adam, which normalizes the step of each rank. Use a learning
    rate for the batch of one rank.

    Floating-point buffers, such as BatchNorm's statistics, are averaged with the parameters;
    BatchNorm's counters are not, since all ranks have the same counters if no rank skips steps.

    With ``set_num_samples`` and ``fraction`` the method is federated averaging (McMahan et al.
    2017, arXiv:1602.05629); with ``proximal`` it is FedProx (Li et al. 2020, arXiv:1812.06127).

    The constructor is collective: it broadcasts the model of rank 0 and hooks the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: plain torch optimizer of the model's parameters.
        steps: steps per round: a number; a function of the index of the round, from 0; or
            ``"auto"`` for the smallest number with which averaging takes at most ``share`` of the
            time, by measurement.
        state: treatment of the optimizer's state when replicas are averaged. ``local``: each rank
            keeps its own state, as in torch, post-local SGD and DiLoCo. ``average``: the state is
            averaged, too; each state tensor adds as many bytes as its parameter to a message, and
            ``steps=1`` is exact for momentum. ``reset``: the state is cleared, because it is
            outdated after a long round.
        share: largest fraction of the time for averaging, with ``"auto"``.
        most: largest number of steps, with ``"auto"``.
        compression: codec of parameters. With a codec, ranks send the changes since the last
            round, and each node stores one more copy of the model.
        fraction: fraction of the ranks that is drawn at random for each round; the number of ranks
            is rounded, and at least 1. The mean is over the drawn ranks, and all ranks begin the
            next round with the mean. A rank that is not drawn keeps its optimizer state;
            ``state="reset"`` clears the state on all ranks.
        seed: seed of the draws, the same on every rank. A loaded state includes the seed.
        proximal: mu of the term mu/2 ||w - w_round||^2 that is added to the loss of local steps;
            each rank stores a copy of w_round, the model at the start of the round.

    Raises:
        ConfigError: an argument is not valid.

    Source: Stich 2019, arXiv:1805.09767, Algorithm 1. Differs: the result is the last iterate, not
    a weighted mean of all iterates.
    """

    _SHARED: ClassVar[Fields] = {"pace": "_pace"}
    _OWN: ClassVar[Fields] = {"averagings": "_averagings[]"}

    _refusal_of_draws: ClassVar[str | None] = None

    def __init__(  # noqa: PLR0913 - keyword options of users
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: Steps = 8,
        *,
        state: str = "local",
        share: float = 0.1,
        most: int = 512,
        compression: Compressing | None = None,
        fraction: float = 1.0,
        seed: int = 0,
        proximal: float = 0.0,
    ) -> None:
        checked("state", state, Literal["local", "average", "reset"])
        self._pace = SyncInterval(steps, share=share, most=most)
        refusal = self._refusal_of_draws if fraction != 1 else None
        federated = Federated(
            fraction=fraction, seed=seed, proximal=proximal, state=state, refusal=refusal
        )
        super().__init__(model, optimizer, compression=compression, federated=federated)
        self._state = state
        self._averagings = [
            self._exchange.averages_parameters(),
            self._exchange.averages_buffers(),
        ]
        if state == "average":
            self._averagings.append(self._exchange.averages_state())

    @property
    def facts(self) -> dict[str, Any]:
        """Human-readable figures; see ``LocalMethod``."""
        return {**super().facts, "steps": self._pace.steps_of(self.rounds.number)}

    def _after_step(self) -> None:
        self.rounds.agrees = False  # rounds also end in a world of one rank
        if self.rounds.step_in_round >= self._pace.steps_of(self.rounds.number):
            self._end_round()

    def _end_round(self) -> None:
        opening = self._exchange.begin(self._averagings, self._samples[0])
        self._exchange.complete(self._averagings)
        if self._state == "reset":
            self._optimizer.state.clear()
        self._pace.learn(opening.step_s, opening.round_s)
        self.rounds.close(agrees=opening.total_weight > 0)


class HierarchicalLocalSGD(LocalSGD):
    """Averages parameters in nodes every ``node_steps`` steps, over all ranks every ``steps``.

    With ``node_steps=1`` the ranks of a node average gradients in every step, so that a node
    trains like one rank with a larger batch, and parameters are averaged between nodes.

    The constructor is collective: it broadcasts the model of rank 0 and hooks the optimizer.

    Args:
        model: as for ``LocalSGD``.
        optimizer: as for ``LocalSGD``.
        steps: steps between two averages over all ranks, as for ``LocalSGD``.
        node_steps: steps between two averages inside a node.
        options: other options of ``LocalSGD``.

    Raises:
        ConfigError: an argument is not valid.

    Source: Lin et al. 2020, arXiv:1808.07217, section 5 (hierarchical local SGD).
    """

    _refusal_of_draws = (
        "fraction must be 1 for HierarchicalLocalSGD, which averages over all ranks of a node; "
        "leave fraction out, or use LocalSGD"
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: Steps = 16,
        *,
        node_steps: int = 1,
        **options: Any,
    ) -> None:
        checked("node_steps", node_steps, Number)
        super().__init__(model, optimizer, steps, **options)
        self._node_steps = node_steps
        node = self._exchange.node
        if node_steps == 1:
            self._synchronous.over(node)
            return
        self._node_rounds = Rounds(node, RoundClock(), self._synchronous)
        self._samples.append(SampleSums())
        self._node_averagings = [
            self._exchange.averages_parameters(node),
            self._exchange.averages_buffers(node),
        ]

    def _after_step(self) -> None:
        number = self.rounds.number
        super()._after_step()
        if self._node_steps == 1:
            return
        self._node_rounds.step = self.rounds.step
        is_over = self.rounds.number > number
        if not is_over and self.rounds.step_in_round % self._node_steps == 0:
            self._node_rounds.takes_part = self.rounds.takes_part
            self._exchange.begin(self._node_averagings, self._samples[1], self._node_rounds)
            self._exchange.complete(self._node_averagings, self._node_rounds)

    def _end_round(self) -> None:
        super()._end_round()
        for samples in self._samples:
            samples.clear()


DROP = 0.5  # a learning rate has dropped if it is at most this fraction of its maximum


class PostLocalSGD(LocalSGD):
    """Averages gradients in every step of a first phase, and parameters in rounds afterwards.

    The constructor is collective: it broadcasts the model of rank 0 and hooks the optimizer.

    Args:
        model: as for ``LocalSGD``.
        optimizer: as for ``LocalSGD``.
        steps: steps per round, as for ``LocalSGD``.
        start: number of synchronous steps; or ``"lr_drop"`` to end the first phase one step after
            the learning rate of a group has dropped to at most half of its maximum.
        options: other options of ``LocalSGD``.

    Raises:
        ConfigError: an argument is not valid.

    Source: Lin et al. 2020, arXiv:1808.07217, which changes the phase at the first drop of the
    learning rate. torch's ``PostLocalSGDOptimizer`` with ``PeriodicModelAverager`` takes the same
    steps.
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
        checked("start", start, Literal["lr_drop"] | Count)
        super().__init__(model, optimizer, steps, **options)
        self._start = start
        self._highest = [0.0 for _ in optimizer.param_groups]
        self._reducer = self._synchronous.over(self._comm)
        self._go(is_local=start == 0)

    @property
    def _is_in_round(self) -> bool:
        return self._is_local

    @property
    def facts(self) -> dict[str, Any]:
        """Human-readable figures; see ``LocalMethod``."""
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
            self._reducer.switch(is_on=not is_local)

    def _has_ended(self) -> bool:
        """Return whether the synchronous phase has ended; the same on every rank.

        A rank whose learning rate drops raises a flag, which all ranks receive in the next step.
        """
        if isinstance(self._start, int):
            return self.rounds.step >= self._start
        seen = self._wants_switch
        if self._reducer is not None:
            seen = bool(self._reducer.steps.raised_flags & SWITCH)
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        # The program may add parameter groups.
        pairs = zip_longest(rates, self._highest[: len(rates)], fillvalue=0.0)
        self._highest = [max(pair) for pair in pairs]
        both = zip(rates, self._highest, strict=True)
        self._wants_switch |= any(rate <= DROP * highest for rate, highest in both)
        self._raise()
        return seen
