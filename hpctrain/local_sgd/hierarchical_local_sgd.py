"""``HierarchicalLocalSGD``: the ranks of a node agree often, the nodes rarely."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.local_sgd.local_sgd import LocalSGD
from hpctrain.local_sgd.rounds import Rounds, SampleSums, Steps


class HierarchicalLocalSGD(LocalSGD):
    """Averages parameters inside each node every ``node_steps``, over all ranks every ``steps``.

    With ``node_steps=1`` the ranks of a node average gradients in every step, so that a node
    trains as one rank with a larger batch does, and the nodes are local to each other.

    Source: Lin et al. 2020, arXiv:1808.07217, section 5 (hierarchical local SGD).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: Steps = 16,
        *,
        node_steps: int = 1,
        **options: Any,
    ) -> None:
        """Give all ranks the model of rank 0 and hook the optimizer. Collective.

        Args:
            model: as for ``LocalSGD``.
            optimizer: as for ``LocalSGD``.
            steps: between two averagings over all ranks, as for ``LocalSGD``.
            node_steps: between two averagings inside a node.
            options: the others of ``LocalSGD``.

        Raises:
            ConfigError: an argument is not valid.
        """
        if node_steps < 1:
            raise ConfigError(f"node_steps must be at least 1, got {node_steps}")
        super().__init__(model, optimizer, steps, **options)
        self._node_steps = node_steps
        node = self._exchange.node
        if node_steps == 1:
            self._reducer_over(node)
            return
        self._node_rounds = Rounds(node)
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
