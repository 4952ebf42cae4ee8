"""``DiLoCo``: rounds of local steps, each followed by an outer step of all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hpctrain.compress.by_name import Compressing
from hpctrain.core.checks import Count, Decay, Number, Positive, checked
from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.averaged_tensors import NamedTensors
from hpctrain.local_sgd.federated import Federated
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.local_sgd.replica_weight import SampleSums
from hpctrain.local_sgd.rounds import RoundOpening
from hpctrain.local_sgd.state_fields import Fields
from hpctrain.local_sgd.sync_interval import Steps, SyncInterval


class DiLoCo(LocalMethod):
    """Takes an outer Nesterov SGD step on all ranks after every ``steps`` inner steps.

    The outer gradient is θ_old - mean θ_k. The inner optimizer keeps its state. Every rank
    continues with the outer model; each node stores one copy of the outer model and of the outer
    momentum. With several ``fragments``, parts of the model are exchanged separately, evenly
    spread over the round, which lowers the peak of traffic. With ``delay``, a fragment is sent
    while training continues, and the outer step of the fragment follows ``delay`` steps later.

    ``finish()`` completes the exchanges in flight, takes an outer step for all fragments that have
    changed since they were sent, and copies the outer model to every rank. A parameter that is
    unfrozen or added later joins the smallest fragment, and starts in the outer model as the mean
    of the replicas.

    With ``outer_lr=1`` and ``outer_momentum=0`` the method is ``LocalSGD``. Outer learning rate
    and momentum are constant.

    The constructor is collective: it broadcasts the model of rank 0 and hooks the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: inner optimizer, a plain torch optimizer of the model's parameters.
        steps: inner steps of a round, as for ``LocalSGD``.
        outer_lr: learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step.
        fragments: number of parts of the model that are exchanged separately.
        delay: inner steps between the send of a fragment and its outer step, at most the steps of
            a round.
        keep: weight, 0 to 1, of a rank's own parameters when the rank copies the outer model.
            None means 0 without a delay, and 0.5 with a delay, because weight 0 would discard the
            steps during the delay.
        share: as for ``LocalSGD``.
        most: as for ``LocalSGD``.
        compression: codec of outer gradients.
        fraction: as for ``LocalSGD``; requires ``fragments=1``, ``delay=0`` and ``keep=0``.
        seed: seed of the random draws of ranks.
        proximal: as for ``LocalSGD``; with the same requirements as ``fraction``.

    Raises:
        ConfigError: an argument is not valid.

    Source: Douillard et al. 2023, arXiv:2311.08105, Algorithm 1; fragments and delay: Douillard et
    al. 2025, arXiv:2501.18512. Floating-point buffers are averaged at the end of a round.
    """

    _SHARED: ClassVar[Fields] = {"pace": "_pace", "parts": "_parts", "sent": "_sent"}
    _OWN: ClassVar[Fields] = {"under_way": "_fragments[]", "due": "_due"}

    def __init__(  # noqa: PLR0913 - keyword options of users
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: Steps = 100,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        keep: float | None = None,
        share: float = 0.1,
        most: int = 512,
        compression: Compressing | None = None,
        fraction: float = 1.0,
        seed: int = 0,
        proximal: float = 0.0,
    ) -> None:
        _check(outer_lr, outer_momentum, fragments, delay, keep)
        self._pace = SyncInterval(steps, share=share, most=most, least=max(fragments, delay))
        self._delay, self._keep = delay, (0.5 if delay else 0.0) if keep is None else keep
        refusal = _refusal(fragments, self._delay, self._keep)
        federated = Federated(fraction=fraction, seed=seed, proximal=proximal, refusal=refusal)
        super().__init__(model, optimizer, compression=compression, federated=federated)
        self._parts = divided(self.replica.parameters(), fragments)
        """Names of the parameters of each fragment."""
        self._fragments = [
            self._exchange.anchors_parameters(
                partial(self._part, number), lr=outer_lr, momentum=outer_momentum
            )
            for number in range(fragments)
        ]
        self._sent = [0] * fragments  # step after which each fragment was sent last
        self._due = [0] * fragments  # step after which each fragment in flight is completed
        self._samples = [SampleSums() for _ in range(fragments)]
        self.rounds.samples = self._samples[-1]  # samples since the last fragment was sent
        self._buffers = self._exchange.averages_buffers()

    @property
    def facts(self) -> dict[str, Any]:
        """Human-readable figures; see ``LocalMethod``."""
        return {**super().facts, "steps": self._steps}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model by the outer model inside the block. Collective."""
        self._require_open()
        if self.rounds.agrees:
            yield
            return
        replica, anchors = self.replica, self._exchange.anchor()
        outer, others = {}, [*replica.buffers()]
        for name, tensor in replica.unequal_parameters():
            if name in anchors and anchors[name].shape == tensor.shape:
                outer[name] = anchors[name]
            else:  # the parameter was added after the last exchange
                others.append((name, tensor))
        with replica.holding(outer | replica.means(others, self.rounds.share())):
            yield

    def _start_again(self) -> None:
        super()._start_again()
        self.rounds.agrees = False  # replicas differ from the outer model

    @property
    def _steps(self) -> int:
        steps = self._pace.steps_of(self.rounds.number)
        if steps < max(len(self._fragments), self._delay):
            raise ConfigError(
                f"steps must be at least fragments and at least delay, got "
                f"steps={steps}, fragments={len(self._fragments)}, delay={self._delay}; increase "
                f"steps"
            )
        return steps

    def _after_step(self) -> None:
        self.rounds.agrees = False  # also in a world of one rank, which has an outer model
        steps, step_in_round = self._steps, self.rounds.step_in_round
        agrees = len(self._fragments) == 1 and not self._keep and not self._delay
        for number, fragment in enumerate(self._fragments):
            if fragment.is_in_flight and self.rounds.step >= self._due[number]:
                self._exchange.complete([fragment], keep=self._keep)
            if step_in_round == (number + 1) * steps // len(self._fragments):
                agrees &= self._send(number)
        if step_in_round >= steps:
            self.rounds.close(agrees=agrees)

    def _send(self, number: int) -> bool:
        """Send fragment ``number``; without delay, take its outer step. Collective.

        Returns:
            Whether any replica has a weight.
        """
        fragment, num_fragments = self._fragments[number], len(self._fragments)
        opening = self._begin(number)
        if number == num_fragments - 1:
            self._pace.learn(opening.step_s, opening.round_s * num_fragments)
        self._due[number] = self.rounds.step + self._delay
        if not self._delay:
            self._exchange.complete([fragment], keep=self._keep)
        return opening.total_weight > 0

    def _begin(self, number: int) -> RoundOpening:
        """Send fragment ``number``; with the last fragment also average buffers. Collective."""
        is_last = number == len(self._fragments) - 1
        buffers = [self._buffers] if is_last else []
        opening = self._exchange.begin([self._fragments[number], *buffers], self._samples[number])
        self._exchange.complete(buffers)
        if opening.total_weight:
            self._sent[number] = self.rounds.step
        return opening

    def _end_round(self) -> None:
        agrees = True
        for number, fragment in enumerate(self._fragments):
            was_in_flight = fragment.is_in_flight
            has_stepped = self._sent[number] < self.rounds.step
            self._exchange.complete([fragment], keep=self._keep if has_stepped else 0.0)
            if has_stepped:
                agrees &= self._begin(number).total_weight > 0
                self._exchange.complete([fragment])
            elif self._keep and not was_in_flight:
                fragment.take_anchor()
        self.rounds.close(agrees=agrees)

    def _end_round_equally(self) -> None:
        """End a round in which no replica counts; with ``fraction``, drop the local steps."""
        if not self.rounds.draw.is_partial:
            super()._end_round_equally()
            return
        self._fragments[0].take_anchor()
        self.replica.average_buffers()
        self.rounds.agrees = True

    def _part(self, number: int) -> list[str]:
        """Return the names in fragment ``number``; add new parameters to the smallest fragment."""
        sizes = {name: tensor.nbytes for name, tensor in self.replica.roster.current()}
        known = {name for part in self._parts for name in part}
        for name in [name for name in sizes if name not in known]:
            smallest = min(self._parts, key=lambda part: sum(sizes.get(n, 0) for n in part))
            smallest.append(name)
        return self._parts[number]


def divided(parameters: NamedTensors, num_parts: int) -> list[list[str]]:
    """Divide parameters into consecutive, nonempty parts of similar bytes; return the names."""
    if num_parts > len(parameters):
        raise ConfigError(
            f"fragments must be at most the number of parameters, {len(parameters)}, got "
            f"fragments={num_parts}; use fewer fragments"
        )
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    total, before = sum(p.nbytes for _, p in parameters), 0
    for number, (name, parameter) in enumerate(parameters):
        middle = before + parameter.nbytes / 2
        wanted = min(int(middle * num_parts / (total or 1)), num_parts - 1)
        last = max((i for i, part in enumerate(parts) if part), default=-1)
        left = len(parameters) - number
        place = min(max(wanted, last, num_parts - left), last + 1)
        parts[place].append(name)
        before += parameter.nbytes
    return parts


def _check(
    outer_lr: float, outer_momentum: float, fragments: int, delay: int, keep: float | None
) -> None:
    checked("outer_lr", outer_lr, Positive)
    checked("outer_momentum", outer_momentum, Decay)
    checked("fragments", fragments, Number)
    checked("delay", delay, Count)
    checked("keep", keep, Decay | None)


def _refusal(fragments: int, delay: int, keep: float) -> str | None:
    """Return why these options exclude ``fraction`` and ``proximal``; None if they do not."""
    if fragments == 1 and not delay and not keep:
        return None
    return (
        f"all ranks must begin a round with the same model for fraction or proximal, got "
        f"{fragments=}, {delay=}, {keep=}; use fragments=1, delay=0 and keep=0"
    )
