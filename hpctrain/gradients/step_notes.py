"""What ranks tell each other by the message that opens a step: flags, and the loss."""

import math
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.gradients.sample_count import NUM_FLAGS


class StepNotes:
    """The part of ``DistributedOptimizer`` that lets all ranks see what one of them has to say.

    It costs no message: all of it rides in one that is sent anyway.
    """

    _exchange: Any = None  # what averages, and has ``steps``; None where there is nobody
    _own_flags, _own_loss = 0, math.nan  # in a world of one

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._exchange.steps.raised_flags if self._exchange else self._own_flags

    def raise_flags(self, flags: int) -> None:
        """Let every rank see these bits in ``raised_flags`` when a step is over.

        They ride in a message that is sent anyway, in every step until other flags are given.
        Not collective; call it before ``backward``.

        Args:
            flags: bits 0 to 3, such as "somebody asked me to stop".

        Raises:
            ConfigError: there are other bits.
        """
        if not 0 <= flags < 1 << NUM_FLAGS:
            raise ConfigError(f"flags are bits 0 to {NUM_FLAGS - 1}, got {flags:#b}")
        self._own_flags = flags
        if self._exchange:
            self._exchange.steps.flags = flags

    @property
    def mean_loss(self) -> float:
        """Mean of what ranks have told by ``tell_loss``, over all samples of the last step.

        The same on every rank, known when ``backward()`` has returned, with ``shard="node"`` when
        ``synchronize()`` has; NaN before any was told.
        """
        return self._exchange.steps.mean_loss if self._exchange else self._own_loss

    def tell_loss(self, loss: float) -> None:
        """Let every rank see the mean loss of a step in ``mean_loss``.

        It rides in a message that is sent anyway, weighted as gradients are. Not collective, but
        every rank calls it, before ``backward``; one without samples tells 0.
        """
        self._own_loss = loss
        if self._exchange:
            self._exchange.steps.loss = loss
