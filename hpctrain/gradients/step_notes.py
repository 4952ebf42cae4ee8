"""What all ranks learn of a step beside its gradients: flags, the loss, if sums are finite."""

from hpctrain.core.errors import ConfigError
from hpctrain.gradients.optimizer_exchange import OptimizerExchange
from hpctrain.gradients.sample_count import NUM_FLAGS


class StepNotes:
    """The part of ``DistributedOptimizer`` that lets all ranks see what one of them has to say.

    It costs no message: all of it rides in one that is sent anyway.
    """

    _exchange: OptimizerExchange

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return self._exchange.steps.raised_flags

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
        self._exchange.steps.flags = flags

    @property
    def mean_loss(self) -> float:
        """Mean of what ranks have told by ``tell_loss``, over all samples of the last step.

        The same on every rank, known when ``backward()`` has returned, with ``shard="node"`` when
        ``synchronize()`` has; NaN before any was told.
        """
        return self._exchange.steps.mean_loss

    def tell_loss(self, loss: float) -> None:
        """Let every rank see the mean loss of a step in ``mean_loss``.

        It rides in a message that is sent anyway, weighted as gradients are. Not collective, but
        every rank calls it, before ``backward``; one without samples tells 0.
        """
        self._exchange.steps.loss = loss

    @property
    def sums_are_finite(self) -> bool | None:
        """Whether the averages of the last backward are finite, as ``look_at_sums`` asks for.

        The same on every rank, until the step. None where nobody knows: before a backward, with a
        codec, sparse gradients, Adasum, ``shard``, accelerators that sum by themselves, ranks
        without memory in common, and alone.
        """
        return self._exchange.sums_are_finite

    def look_at_sums(self) -> None:
        """Look at averages for what is not finite while they are summed, from the next step on.

        That costs less than a percent of a step, where looking at all gradients behind it
        costs several. Not collective, but every rank calls it, between two steps.
        """
        self._exchange.look_at_sums()
