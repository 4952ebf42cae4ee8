"""Combination of gradients that gives bitwise identical steps on any number of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.core.user_error import noted
from hpctrain.data.loader import Loader
from hpctrain.gradients.fixed_tree import aligned_parts
from hpctrain.gradients.reproducible import Reproducible
from hpctrain.train.model import BuiltModel
from hpctrain.train.refusals import step_name
from hpctrain.train.run_config import RunConfig
from hpctrain.train.step_exchange import (
    Figures,
    Forward,
    LossObserver,
    StepBatch,
    StepExchange,
    column_sums,
)


class ReproducibleExchange(StepExchange):
    """Sums the gradients of micro-shards in the order of a fixed tree (``train.reproducible``).

    Micro-shards are equal parts of the global batch; their number is fixed for the whole run.

    Args:
        config: configuration of the run.
        comm: all ranks.
        built: identical model on all ranks, and a plain optimizer.
    """

    is_reproducible = True
    method: Reproducible

    def __init__(self, config: RunConfig, comm: Communicator, built: BuiltModel) -> None:
        with agreed(comm):
            num_micro_shards = config.train.micro_shards_on(comm.size)
            assert num_micro_shards is not None
            method = Reproducible(
                built.model,
                built.optimizer,
                comm,
                num_micro_shards=num_micro_shards,
                seed=config.seed,
            )
        super().__init__(config, comm, built.model, built.optimizer, method)

    def backward(
        self, batch: StepBatch, forward: Forward, observer: LossObserver
    ) -> tuple[float, int]:
        """Compute the gradients of the global batch; return its loss. Collective."""

        def loss_of(part: Any) -> Tensor:
            return forward(*part, tries_backward=observer.is_first)[1]

        with noted(step_name(self.config), *batch.tensors):
            loss = self.method.backward(batch.tensors, loss_of, num_samples=batch.num_global)
        return loss, batch.num_samples

    def own_loss(self, loss: float) -> float:
        """Return the mean loss of this rank's samples."""
        del loss
        return self.method.own_loss

    def counted(self, loss: float, batch: StepBatch, num_samples: int) -> tuple[float, int]:
        """Return loss and number of samples of the global batch on rank 0, zeros on other ranks.

        The sums over the ranks are therefore exact.
        """
        del num_samples
        return (loss, batch.num_global) if self.comm.rank == 0 else (0.0, 0)

    def test_parts(
        self, values: tuple[Tensor, Tensor], loader: Loader
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield ``(inputs, labels, None)`` for each micro-shard of this rank."""
        assert loader.micro_shards is not None
        shards = aligned_parts(values, loader.step_samples, loader.micro_shards, self.method.own)
        for inputs, labels in shards:
            yield inputs, labels, None

    def sum_rows(self, rows: Sequence[Sequence[float]], num_columns: int) -> list[float]:
        """Return the sum of each column over the rows of all ranks, rounded once. Collective."""
        gathered = [row for each in self.comm.allgather_object(list(rows)) for row in each]
        return column_sums(gathered, num_columns)

    def shared_state(self) -> dict[str, Any]:
        """Return the state from which any number of ranks can continue. Collective."""
        return {**super().shared_state(), "steps": self.method.state_dict()}

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from a saved state. Collective."""
        super().restore(shared, own)
        if shared.get("steps"):
            self.method.load_state_dict(shared["steps"])
        else:  # a run without reproducible steps wrote the checkpoint
            self.method.next_step = shared["step"]

    @property
    def facts(self) -> Figures:
        """Entries for the record that each start or resume of a run writes."""
        return {"reproducible": self.method.facts}

    def describe(self) -> list[tuple[str, str]]:
        """Return a row ``(title, text)`` about micro-shards."""
        return [("reproducible", self.method.describe())]
