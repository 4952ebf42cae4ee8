"""Sharded embeddings of a model; the rows are not parameters and are updated separately."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.format.shard import Shard
from hpctrain.checkpoint.format.state_tree import component
from hpctrain.checkpoint.inspection import checkpoint_of
from hpctrain.checkpoint.loading import load
from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.train.run_config import RunConfig


@runtime_checkable
class RowTable(Protocol):
    """Interface of ``ShardedEmbedding``, a table whose rows are divided among the ranks."""

    lr: float

    def zero_grad(self) -> None:
        """Clear the gradients of the rows."""

    def set_num_samples(self, num_samples: float, nominal: float) -> None:
        """Weight this rank's gradients by ``num_samples / nominal`` in the next step."""

    def step(self) -> None:
        """Average gradients and update the rows. Collective."""

    def sharded_state(self) -> dict[str, Any]:
        """Return the rows and the optimizer state of this rank, for a checkpoint."""

    def wanted(self, path: str) -> dict[str, Shard]:
        """Return the shards that this rank reads from a checkpoint, by paths below ``path``."""

    def load_sharded_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``sharded_state()`` that any number of ranks saved. Collective."""


class Tables:
    """Sharded embeddings of a model, by name; false in boolean context if there are none.

    Args:
        model: its modules are searched for ``RowTable``.
        config: configuration of the run.

    Raises:
        ConfigError: the configuration does not support sharded embeddings.
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        named = model.named_modules()
        self._tables = {name: m for name, m in named if isinstance(m, RowTable)}
        self._peaks = {name: table.lr for name, table in self._tables.items()}
        self.factor = 1.0  # multiplies the learning rates in this step
        train = config.train
        refused = {
            f"train.precision = {train.precision} scales the loss": train.precision == "fp16",
            "train.reproducible sums gradients differently": train.reproducible,
            "train.ema averages parameters": train.ema > 0,
            f"sync.method = {config.sync.method} lets replicas differ": config.sync.is_local,
            "[parallel] divides the model": config.parallel.divides,
            "rollback has no copy of rows": "rollback" in (train.on_non_finite, train.on_spike),
        }
        if self and (reason := next((text for text, holds in refused.items() if holds), "")):
            raise ConfigError(
                f"ShardedEmbedding must step its rows once for all ranks, but {reason}; omit that "
                f"key, or use torch.nn.Embedding"
            )

    def __bool__(self) -> bool:
        return bool(self._tables)

    def begin(self, num_samples: int, nominal: float) -> None:
        """Clear the gradients of the rows, and set this rank's weight in the next step. Local.

        The weight is ``num_samples / nominal``.
        """
        for table in self._tables.values():
            table.zero_grad()
            table.set_num_samples(num_samples, nominal)

    @torch.no_grad()
    def look_up_empty(self, model: nn.Module, inputs: Tensor, times: int = 1) -> None:
        """Join the embedding lookups of other ranks, on a rank without samples.

        Runs ``model`` on empty inputs, in evaluation mode, so that running means do not change.
        Collective.

        Args:
            model: model that contains these embeddings.
            inputs: input of the model; only its shape after the first dimension and its dtype are
                used.
            times: number of forward passes.
        """
        if not self or times < 1:
            return
        was_training = model.training
        model.eval()
        for _ in range(times):
            model(inputs[:0])
        model.train(was_training)

    def step(self) -> None:
        """Update the rows, with each learning rate multiplied by ``factor``. Collective."""
        for name, table in self._tables.items():
            table.lr = self._peaks[name] * self.factor
            table.step()

    def state(self) -> dict[str, Any]:
        """Return, for a checkpoint, this rank's rows and optimizer state by embedding name."""
        return {name: table.sharded_state() for name, table in self._tables.items()}

    def wanted(self) -> dict[str, Shard]:
        """Return the shards of embeddings that this rank reads from a checkpoint, by path."""
        found: dict[str, Shard] = {}
        for name, table in self._tables.items():
            found |= table.wanted(f"tables/{component(name)}")
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()`` that any number of ranks saved. Collective.

        Raises:
            CheckpointError: the state lacks an embedding of the model.
        """
        for name, table in self._tables.items():
            if name not in state:
                raise CheckpointError(
                    f"the checkpoint must contain the ShardedEmbedding {name} of the model, but "
                    f"does not; continue with the model that was saved"
                )
            table.load_sharded_state(state[name])

    def load(self, source: Path, comm: Communicator) -> None:
        """Load the rows of the embeddings from a run or a checkpoint. Collective.

        Raises:
            MismatchError: ``source`` is not a run directory or checkpoint; on all ranks.
        """
        if not self:
            return

        def find() -> Path:
            if not source.is_dir():
                raise ConfigError(
                    f"model.init_from must be the directory of a run or of a checkpoint for a "
                    f"model with ShardedEmbedding, got the file {source}; name the directory"
                )
            return checkpoint_of(source, "last")

        loaded = load(on_root(comm, find), comm, into=self.wanted())
        self.restore(loaded.state["tables"])
