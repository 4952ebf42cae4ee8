"""Combination of gradients: accumulation over micro-batches, and averages over ranks."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.checkpoint.format.shard import Shard
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.compress.by_name import codec_named
from hpctrain.compress.codec import Codec, Savings
from hpctrain.core.logs import logger
from hpctrain.core.user_error import noted
from hpctrain.gradients.noise_watch import watch_noise
from hpctrain.gradients.optimizer import DistributedOptimizer
from hpctrain.optim.noise_scale import Measured, NoiseScale
from hpctrain.train.model import BuiltModel
from hpctrain.train.refusals import step_name
from hpctrain.train.run_config import RunConfig
from hpctrain.train.step_exchange import Forward, LossObserver, StepBatch, StepExchange


class AccumulatedExchange(StepExchange):
    """Runs forward and backward over ``train.accumulate`` micro-batches of this rank's samples.

    Args:
        config: configuration of the run.
        comm: all ranks.
        built: identical model on all ranks, and a plain optimizer.
        optimizer: optimizer of this rank.
        method: object that weights this rank by its number of samples and combines gradients.
    """

    def __init__(
        self, config: RunConfig, comm: Communicator, built: BuiltModel, optimizer: Any, method: Any
    ) -> None:
        super().__init__(config, comm, built.model, optimizer, method)
        self._precision, self._step_name = built.precision, step_name(config)

    @property
    def takes_part(self) -> bool:
        """Whether this rank trains on its samples in the current step."""
        return True

    def backward(
        self, batch: StepBatch, forward: Forward, observer: LossObserver
    ) -> tuple[float, int]:
        """Compute the gradients of this rank's samples, one micro-batch at a time. Collective."""
        self.optimizer.zero_grad()
        num_samples = batch.num_samples if self.takes_part else 0
        self._set_num_samples(num_samples, self.config.train.global_batch / self.comm.size)
        accumulate = self.config.train.accumulate
        num_pieces = min(accumulate, num_samples)
        cut = (values.tensor_split(max(num_pieces, 1)) for values in batch.tensors)
        pieces = [*zip(*cut, strict=True)] if num_pieces else []
        self.forward_empty(batch.inputs, accumulate - num_pieces)
        # Most errors about shapes and dtypes occur in the first step; all ranks must raise them.
        with agreed(self.comm) if observer.is_first else nullcontext():
            if pieces:
                loss = forward(*map(_aligned, pieces[0]), tries_backward=observer.is_first)[1]
        if not pieces:
            self._synchronize()  # replaces the backward pass on a rank without samples
            return 0.0, 0
        if accumulate > 1:
            self._set_num_passes(num_pieces)
        value = 0.0
        for number, piece in enumerate(pieces, 1):
            loss = forward(*map(_aligned, piece))[1] if number > 1 else loss
            weight = len(piece[0]) / num_samples
            value += loss.item() * weight
            if number == num_pieces:
                observer.see_loss(value)
            loss = self._precision.scaled(loss)
            with noted(self._step_name, *piece):
                loss.backward(torch.full_like(loss, weight))
            self._end_piece(number, num_pieces, len(piece[0]), num_samples)
        self._end_backward()
        return value, num_samples

    def _set_num_samples(self, num_samples: int, nominal: float) -> None:
        self.method.set_num_samples(num_samples, nominal=nominal)

    def _synchronize(self) -> None:
        """Join the reduction of gradients on a rank without samples. Collective."""
        self.method.synchronize()

    def _set_num_passes(self, num_passes: int) -> None:
        self.method.set_backward_passes_per_step(num_passes)

    def _end_piece(self, number: int, num_pieces: int, size: int, num_samples: int) -> None:
        """Hook after the backward pass of a micro-batch, for subclasses. Local.

        Args:
            number: index of the micro-batch, from 1.
            num_pieces: number of micro-batches.
            size: number of samples in the micro-batch.
            num_samples: number of samples in all micro-batches.
        """

    def _end_backward(self) -> None:
        """Finish the communication that must precede the step. Collective."""


class AveragedExchange(AccumulatedExchange):
    """Averages gradients with a ``DistributedOptimizer``.

    Args:
        config: configuration of the run.
        comm: all ranks.
        built: identical model on all ranks, and a plain optimizer. In each step, the rows of
            sharded embeddings are updated after the parameters.
    """

    def __init__(self, config: RunConfig, comm: Communicator, built: BuiltModel) -> None:
        optimizer = distributed(config, built.model, built.optimizer)
        super().__init__(config, comm, built, optimizer, optimizer)
        self._tables, self.noise = built.tables, _noise(config, comm, optimizer)
        self._measured = list[Measured]()  # norms of the first micro-batch, on a single rank

    def begin(self, rate: float, *, must_agree: bool) -> None:
        """Set the learning rates of the optimizer and of sharded embeddings. Local."""
        super().begin(rate, must_agree=must_agree)
        self._tables.factor = rate

    def report_loss(self, loss: float) -> None:
        """Add this rank's loss to the step header. Local."""
        self.method.report_loss(loss)

    def mean_loss(self, loss: float) -> float:
        """Return the mean loss of all samples of the step."""
        del loss
        return float(self.method.mean_loss)

    @property
    def sums_are_finite(self) -> bool:
        """Whether the averaged gradients are known to be finite."""
        return self.method.sums_are_finite is True

    def look_at_sums(self) -> None:
        """Compute ``sums_are_finite`` in each step, from the next step on. Local."""
        self.method.look_at_sums()

    def step(self) -> None:
        """Update the parameters and the rows of sharded embeddings. Collective."""
        super().step()
        self._tables.step()

    def _set_num_samples(self, num_samples: int, nominal: float) -> None:
        self._tables.begin(num_samples, nominal)
        super()._set_num_samples(num_samples, nominal)

    def forward_empty(self, inputs: Tensor, times: int = 1) -> None:
        """Join the embedding lookups on a rank without samples. Collective."""
        self._tables.look_up_empty(self.model, inputs, times)

    def _end_piece(self, number: int, num_pieces: int, size: int, num_samples: int) -> None:
        # With several ranks ``watch_noise`` adds the norms. A single rank adds the norm of the
        # first micro-batch and the norm of the whole batch.
        if self.noise is None or self.comm.size > 1 or num_pieces == 1:
            return
        if number == 1:
            weight = size / num_samples
            self._measured = [(size, (self.gradient_norm() / weight) ** 2)]
        if number == num_pieces:
            self.noise.add(self._measured, (num_samples, self.gradient_norm() ** 2))

    @property
    def codec(self) -> Codec | None:
        """Codec of the gradients; None on a single rank."""
        found: Codec | None = self.method.codec
        return found

    @property
    def savings(self) -> Savings | None:
        """Bytes that compression saves; None if gradients are not compressed."""
        found: Savings | None = self.method.savings
        return found if self.config.sync.compression != "none" else None

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale of all ranks, in samples; None if not measured. Collective."""
        return None if self.noise is None else self.noise.value(self._mean_noise())

    def _mean_noise(self) -> Tensor | None:
        if self.noise is None:
            return None
        sums = self.noise.sums.clone()
        self.comm.allreduce_(sums, scale=1 / self.comm.size).wait()
        return sums

    def shared_state(self) -> dict[str, Any]:
        """Return the state from which any number of ranks can continue. Collective."""
        codec = self.codec
        return {
            **super().shared_state(),
            **({"tables": self._tables.state()} if self._tables else {}),
            "codec": codec.shared_state(self.comm) if codec else None,
            "noise": self._mean_noise(),
        }

    def own_state(self) -> dict[str, Any]:
        """Return the state that only this rank has: of its codec and its noise estimator."""
        return {
            **super().own_state(),
            "codec": self.codec.state_dict() if self.codec else None,
            "noise": self.noise.sums.clone() if self.noise else None,
        }

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from a saved state. Collective."""
        super().restore(shared, own)
        if self._tables:
            self._tables.restore(shared.get("tables", {}))
        if (codec := self.codec) is not None:
            if own is not None and own.get("codec") and codec.fits(own["codec"]):
                codec.load_state_dict(own["codec"])
            elif shared.get("codec"):
                codec.load_shared_state(shared["codec"], self.comm)
        noise = (shared if own is None else own).get("noise")
        if self.noise and noise is not None:
            self.noise.sums = noise.clone()

    def wanted(self, latest: Callable[[], Any]) -> Mapping[str, Shard] | None:
        """Return the embedding shards that this rank reads from a checkpoint. Collective.

        Return None without sharded embeddings, or if there is no checkpoint.
        """
        return self._tables.wanted() if self._tables and latest() is not None else None


class ShardedExchange(AveragedExchange):
    """Averages gradients if each node stores the parameters once (``train.shard = "node"``)."""

    def clip(self, max_norm: float) -> float:
        """Clip the averaged gradients in the next step; return the unclipped norm. Collective."""
        return float(self.method.clip_grad_norm_(max_norm))

    def gradient_norm(self) -> float:
        """Return the L2 norm of the averaged gradients. Collective."""
        return self.clip(math.inf)

    def clip_values(self, max_value: float) -> None:
        """Clip each element of the averaged gradients in the next step. Local."""
        self.method.clip_grad_value_(max_value)

    def _end_backward(self) -> None:
        self.method.synchronize()  # the flags of all ranks must arrive before the step


def distributed(config: RunConfig, model: nn.Module, optimizer: Optimizer) -> Any:
    """Return an optimizer that averages gradients according to ``[train]`` and ``[sync]``."""
    train, sync = config.train, config.sync
    return DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        codec_named(sync.compression, sync.compression_args, "sync.compression_args"),
        shard=None if train.shard == "none" else train.shard,
        master_dtype=None if train.master_dtype == "none" else torch.float32,
    )


def _aligned(values: Tensor) -> Tensor:
    """Return ``values`` at an address that is a multiple of 64 bytes; copy if necessary.

    The rounding of matrix products depends on the alignment of the address, and a resumed run
    stores a batch at another address.
    """
    return values.clone() if values.data_ptr() % 64 else values


def _noise(config: RunConfig, comm: Communicator, optimizer: Any) -> NoiseScale | None:
    """Return the noise-scale estimator of ``optimizer``; None if not configured."""
    if not config.log.noise_scale:
        return None
    noise = NoiseScale()
    if comm.size > 1:
        watch_noise(optimizer, noise)
    elif config.train.accumulate == 1:
        logger.warning(
            "log.noise_scale must have gradients of two batch sizes, but a single rank with "
            "train.accumulate = 1 has only one; set train.accumulate = 2"
        )
    return noise
