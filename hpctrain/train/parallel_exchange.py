"""Combination of gradients if ranks divide the model according to ``[parallel]``."""

import math
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.format.shard import Shard
from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.checkpoint.loading import read_manifest
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ReplicaError
from hpctrain.core.user_error import noted
from hpctrain.data.loader import Loader
from hpctrain.gradients.sample_count import bits_of, flags_of
from hpctrain.parallel.dtensor import local
from hpctrain.train.model import BuiltModel
from hpctrain.train.model_parallel import ModelParallel
from hpctrain.train.parallel_layout import ParallelLayout
from hpctrain.train.refusals import step_name
from hpctrain.train.run_config import RunConfig
from hpctrain.train.step_exchange import Forward, LossObserver, StepBatch, StepExchange


class ParallelExchange(StepExchange):
    """Trains with tensor, sequence, pipeline and data parallelism, and ZeRO.

    Args:
        config: configuration of the run.
        comm: all ranks.
        built: the whole model, identical on all ranks, and a plain optimizer.
    """

    method: ModelParallel
    raised_flags = 0
    communication_seconds = 0.0

    def __init__(self, config: RunConfig, comm: Communicator, built: BuiltModel) -> None:
        with agreed(comm):
            device_type = next(built.model.parameters()).device.type
            self._layout = ParallelLayout(config.parallel, device_type)
            method = ModelParallel(config, built, self._layout)
        super().__init__(config, comm, method.model, method.optimizer, method)
        self._flags, self._loss, self._mean_loss = 0, 0.0, math.nan

    def raise_flags(self, flags: int) -> None:
        """Add ``flags`` to the bits that all ranks receive in this step. Local."""
        self._flags |= flags

    def report_loss(self, loss: float) -> None:
        """Add this rank's loss to the step header. Local."""
        self._loss = loss

    def mean_loss(self, loss: float) -> float:
        """Return the mean loss of all samples of the step."""
        del loss
        return self._mean_loss

    def backward(
        self, batch: StepBatch, forward: Forward, observer: LossObserver
    ) -> tuple[float, int]:
        """Compute and average the gradients of this rank's part of the model. Collective."""
        with noted(step_name(self.config), *batch.tensors):
            loss = self.method.backward(
                batch.tensors, lambda *part: forward(*part)[1], num_samples=batch.num_global
            )
        observer.see_loss(loss)
        began = perf_counter()
        self.method.average()
        num_samples = batch.num_samples if self._layout.leads else 0
        self._exchange_flags(num_samples / batch.num_global)
        self.communication_seconds = perf_counter() - began
        return loss, num_samples

    def _exchange_flags(self, weight: float) -> None:
        """Combine the flags of all ranks, and average their losses. Collective."""
        loss = self._loss * weight if weight else 0.0  # a loss with weight 0 may be NaN
        words = torch.tensor([loss, *bits_of(self._flags)], dtype=torch.float64)
        self.comm.allreduce_(words).wait()
        self._mean_loss, *bits = words.tolist()
        self.raised_flags, self._flags = flags_of(bits), 0

    def clip(self, max_norm: float) -> float:
        """Clip the gradient of the whole model; return its norm before clipping. Collective."""
        return self.method.clip(max_norm)

    def gradient_norm(self) -> float:
        """Return the L2 norm of the gradient of the whole model. Collective."""
        return self.method.clip(math.inf)

    def clip_values(self, max_value: float) -> None:
        """Clip each element of this rank's gradients. Local."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-max_value, max_value)

    def share_buffers(self) -> None:
        """Broadcast the buffers of the first replica to all replicas. Collective."""
        self._layout.share_buffers(self.model)

    def test_parts(
        self, values: tuple[Tensor, Tensor], loader: Loader
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield ``(inputs, labels, output)`` on the leading rank of a replica with samples.

        Collective. Yield nothing on other ranks.
        """
        del loader
        output = self.method.output(*values)
        if output is not None:
            yield *values, output

    def check_replicas(self) -> bool:
        """Compare the replicas of each part of the model. Collective.

        Raises:
            ReplicaError: replicas differ; on all ranks.
        """
        if self.config.parallel.zero:
            return True  # nothing to compare: each rank has a different shard
        mine = str([self._layout.place(axis)[0] for axis in ("pp", "tp")]), self._own_hash()
        found = dict[str, set[str]]()
        for where, value in self.comm.allgather_object(mine):
            found.setdefault(where, set()).add(value)
        if differ := [where for where, values in found.items() if len(values) > 1]:
            raise ReplicaError(
                f"replicas must be equal, but replicas at [pp, tp] = {', '.join(differ)} differ; "
                f"find the code that changes parameters on some ranks only, for example outside "
                f"optimizer.step()"
            )
        return True

    def _own_hash(self) -> str:
        named = self.model.named_parameters()
        return state_hash({name: local(value.detach()) for name, value in named})

    def hash(self) -> str:
        """Return a hash of the model on all ranks. Collective.

        The hash depends on how the ranks divide the model.
        """
        mine = {name: local(value) for name, value in self.model.state_dict().items()}
        return state_hash({"ranks": self.comm.allgather_object(state_hash(mine))})

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements of the whole model."""
        return self.method.num_parameters

    @property
    def layout(self) -> str | None:
        """Axes of the layout, such as ``dp=2 x tp=2``."""
        return self._layout.describe()

    @property
    def seed_offset(self) -> int:
        """Offset of the random seed; identical within a tp group."""
        return self._layout.seed_offset

    def share_out(self, *loaders: Loader) -> None:
        """Configure the loaders to read the samples of this rank's replica. Local."""
        self._layout.share_out(*loaders)

    def local_state(self) -> dict[str, Any]:
        """Return this rank's pieces of the model and optimizer state. Collective."""
        return self.method.state.state()

    def shared_state(self) -> dict[str, Any]:
        """Return the state from which any layout can continue. Collective."""
        return {**self._empty_state(), **self.local_state()}

    def restore_model(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Load this rank's shards of model and optimizer. Local."""
        del own
        self.method.state.load(shared)

    def wanted(self, latest: Callable[[], Any]) -> Mapping[str, Shard] | None:
        """Return this rank's shards in the newest checkpoint; None without one. Collective."""
        newest = latest()
        if newest is None:
            return None
        return self.method.state.wanted(read_manifest(newest, self.comm).tensors)
