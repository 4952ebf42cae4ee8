"""State of a run in addition to model and optimizer: loss scale, averaged weights, best test."""

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
    """Autocast in forward, and loss scaling with fp16.

    Gradients are averaged before they are checked for overflow, so all ranks have the same scale.

    Args:
        name: value of ``train.precision``.
        model: determines the device.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        parameter = next(model.parameters(), None)
        self._device = "cpu" if parameter is None else parameter.device.type
        self._dtype = _TYPES.get(name)
        self._scaler = GradScaler(self._device, enabled=name == "fp16")
        self._scaler.scale(torch.zeros((), device=self._device))
        # This call initializes the scale now, because the first step may have no samples.

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context that runs forward passes in ``train.precision``."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the scale."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> bool:
        """Unscale all gradients; return True if the step must be skipped because of an overflow.

        An overflow halves the scale. If the scale falls below 1, the scale is not the cause of the
        overflow: return False, so that the check of gradients decides about the step.
        """
        if not self._scaler.is_enabled():
            return False
        before = self._scaler.get_scale()
        self._scaler.unscale_(optimizer)
        self._scaler.update()
        return 1.0 <= self._scaler.get_scale() < before

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the ``GradScaler``; empty without scaling."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; no-op without scaling."""
        self._scaler.load_state_dict(dict(state))


def widened(output: Any) -> Any:
    """Convert a 16-bit tensor to float32, for metrics and NumPy; return others unchanged."""
    is_half = isinstance(output, Tensor) and output.dtype in _TYPES.values()
    return output.float() if is_half else output


class Ema:
    """Exponential moving average of weights: ``decay * average + (1 - decay) * weights``.

    The average starts with the weights after the first step.

    Args:
        model: its parameters are averaged.
        decay: between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._parameters: list[Tensor] = [*model.parameters()]
        self._averages: list[Tensor] = []

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current weights. Local."""
        if self._averages:
            foreach_lerp_(self._averages, self._parameters, 1 - self._decay)
        else:
            self._averages = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights inside the block."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self._give(self._averages)
        try:
            yield
        finally:
            self._give(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, named as in the model's state dict; empty before the first step."""
        average = {id(p): a for p, a in zip(self._parameters, self._averages, strict=False)}
        state = self._model.state_dict(keep_vars=True)
        return {name: average[id(p)] for name, p in state.items() if id(p) in average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; ignore the buffers that it may contain."""
        names = {id(p): name for name, p in self._model.state_dict(keep_vars=True).items()}
        parameters = self._parameters if state else []  # none before the first step
        self._averages = [state[names[id(p)]].to(p.device, copy=True) for p in parameters]

    @torch.no_grad()
    def _give(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=False):
            parameter.copy_(value)


class BestTest:
    """Best test of a run so far, and the number of tests since the last improvement."""

    def __init__(self) -> None:
        self.score: float | None = None  # larger is better
        self.step = self.epoch = 0
        self.metric = 0.0
        self.num_since = 0

    def see(self, score: float | None, **place: Any) -> None:
        """Add the result of a test.

        A test with an equal score becomes the best test, because its checkpoint is newer, but
        does not count as an improvement.

        Args:
            score: larger is better; None if not finite.
            place: step, epoch and metric of the test.
        """
        is_better = score is not None and (self.score is None or score > self.score)
        self.num_since = 0 if is_better else self.num_since + 1
        if is_better or (score is not None and score == self.score):
            self.load_state_dict({"score": score, **place})

    def is_over(self, patience: int) -> bool:
        """Return whether none of the last ``patience`` tests was an improvement.

        Return False if ``patience`` is 0.
        """
        return 0 < patience <= self.num_since

    @property
    def facts(self) -> dict[str, Any]:
        """Step, epoch and metric of the best test, for a record; empty before the first test."""
        if self.score is None:
            return {}
        return {"step": self.step, "epoch": self.epoch, "metric": self.metric}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        vars(self).update(state)


class GuardMemory:
    """State of a ``StepGuard`` between steps: recent losses and earlier decisions."""

    def __init__(self, config: TrainingConfig) -> None:
        self.spikes = LossSpikes(config.spike_deviations, config.spike_window)
        self.num_skipped = 0  # number of steps that all ranks have skipped together
        self.lowered_at: int | None = None  # last step at which the learning rate was lowered
        self._config = config

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate in ``step``; below 1 only after a spike."""
        steps, factor = self._config.lowered_steps, self._config.lowered_rate
        since = steps if self.lowered_at is None else step - self.lowered_at
        return 1.0 if since >= steps else factor + (1.0 - factor) * since / steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        own = {"num_left_out": self.num_skipped, "lowered_at": self.lowered_at}
        return {**own, **self.spikes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.num_skipped, self.lowered_at = state["num_left_out"], state["lowered_at"]
        self.spikes.load_state_dict(state)
