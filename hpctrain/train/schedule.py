"""The learning rate of each step, as a factor of its peak: pure functions of the step."""

import math
from collections.abc import Callable

from hpctrain.core.errors import ConfigError
from hpctrain.train.config import ScheduleConfig
from hpctrain.train.targets import call

Factor = Callable[[float], float]
"""From progress after the warm-up, 0 to 1, to the rate over its peak."""


def constant() -> Factor:
    """The peak, always."""
    return lambda _: 1.0


def linear(final: float = 0.0) -> Factor:
    """A straight line from the peak down to ``final``."""
    return lambda progress: 1 + (final - 1) * progress


def cosine(final: float = 0.0) -> Factor:
    """Half a cosine from the peak down to ``final``.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, section 3, without restarts.
    """
    return lambda progress: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


_SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}


def make_schedule(
    config: ScheduleConfig, steps_per_epoch: int, num_steps: int
) -> Callable[[int], float]:
    """The factor of the learning rate at each step, counted from zero.

    Raises:
        ConfigError: there is no such schedule, or it does not take these arguments.
    """
    if config.name not in _SCHEDULES:
        raise ConfigError(f"schedule.name is one of {', '.join(_SCHEDULES)}, got {config.name!r}")
    factor: Factor = call(_SCHEDULES[config.name], (), config.args, "schedule.args")
    warmup = config.warmup_epochs * steps_per_epoch

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return factor((step - warmup) / max(num_steps - warmup, 1))

    return at
