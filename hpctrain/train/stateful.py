"""State of a run next to model and optimizer: loss scale, averaged weights, best test."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hpctrain.core.torch_compat import foreach_lerp_
from hpctrain.optim.loss_spikes import LossSpikes
from hpctrain.train.run_config import TrainingConfig

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Precision of a step: autocast in forward, and a scaled loss where gradients are fp16.

    Gradients are averaged before they are checked, so that all ranks find the same overflow and
    keep the same scale.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        parameter = next(model.parameters(), None)
        self._device = "cpu" if parameter is None else parameter.device.type
        self._dtype = _TYPES.get(name)
        self._scaler = GradScaler(self._device, enabled=name == "fp16")
        self._scaler.scale(torch.zeros((), device=self._device))
        # It has a scale from here on: a part may begin with a step in which a rank has no samples.

    def autocast(self) -> AbstractContextManager[object]:
        """Run forward passes inside in ``train.precision``."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what backward begins with."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> bool:
        """Unscale all gradients; return whether the step is left out because of an overflow.

        Below a scale of 1 the scale is not the cause: then the check of gradients decides.
        """
        if not self._scaler.is_enabled():
            return False
        before = self._scaler.get_scale()
        self._scaler.unscale_(optimizer)
        self._scaler.update()
        return 1.0 <= self._scaler.get_scale() < before

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and when it grows; empty where nothing is scaled."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; no-op without a scale."""
        self._scaler.load_state_dict(dict(state))


def widened(output: Any) -> Any:
    """Return an output of autocast in 32 bits, for metrics and numpy; others unchanged."""
    is_half = isinstance(output, Tensor) and output.dtype in _TYPES.values()
    return output.float() if is_half else output


class Ema:
    """Moving average of a model's weights: ``decay * average + (1 - decay) * weights``.

    It begins with the weights after the first step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._parameters: list[Tensor] = [*model.parameters()]
        self._averages: list[Tensor] = []

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        if self._averages:
            foreach_lerp_(self._averages, self._parameters, 1 - self._decay)
        else:
            self._averages = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged weights inside."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._give(self._averages)
        try:
            yield
        finally:
            self._give(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the names of the model's state; empty before the first step."""
        average = {id(p): a for p, a in zip(self._parameters, self._averages, strict=False)}
        state = self._model.state_dict(keep_vars=True)
        return {name: average[id(p)] for name, p in state.items() if id(p) in average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which may have buffers too."""
        names = {id(p): name for name, p in self._model.state_dict(keep_vars=True).items()}
        parameters = self._parameters if state else []  # none before the first step
        self._averages = [state[names[id(p)]].to(p.device, copy=True) for p in parameters]

    @torch.no_grad()
    def _give(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=False):
            parameter.copy_(value)


class BestTest:
    """The best test of a run so far, and how many have come since."""

    def __init__(self) -> None:
        self.score: float | None = None  # the larger the better
        self.step = self.epoch = 0
        self.metric = 0.0
        self.num_since = 0

    def see(self, score: float | None, **place: Any) -> None:
        """Take in a test; ``score`` is None where it says nothing.

        Of equal ones the later is the best, as its checkpoint stays, but it is no better one.
        """
        is_better = score is not None and (self.score is None or score > self.score)
        self.num_since = 0 if is_better else self.num_since + 1
        if is_better or (score is not None and score == self.score):
            self.load_state_dict({"score": score, **place})

    def is_over(self, patience: int) -> bool:
        """Return whether the last ``patience`` tests were not better; False for 0."""
        return 0 < patience <= self.num_since

    @property
    def facts(self) -> dict[str, Any]:
        """What the last record of a run says; empty before a test."""
        if self.score is None:
            return {}
        return {"step": self.step, "epoch": self.epoch, "metric": self.metric}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        vars(self).update(state)


class GuardMemory:
    """Memory of a ``StepGuard``: the last losses, and its earlier decisions."""

    def __init__(self, config: TrainingConfig) -> None:
        self.spikes = LossSpikes(config.spike_deviations, config.spike_window)
        self.num_left_out = 0  # steps, of all ranks together
        self.lowered_at: int | None = None  # step of which the rate was lowered last
        self._config = config

    def rate(self, step: int) -> float:
        """Return by what the rate of a step is multiplied: it rises linearly to 1."""
        steps, factor = self._config.lowered_steps, self._config.lowered_rate
        since = steps if self.lowered_at is None else step - self.lowered_at
        return 1.0 if since >= steps else factor + (1.0 - factor) * since / steps

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        own = {"num_left_out": self.num_left_out, "lowered_at": self.lowered_at}
        return {**own, **self.spikes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.num_left_out, self.lowered_at = state["num_left_out"], state["lowered_at"]
        self.spikes.load_state_dict(state)
