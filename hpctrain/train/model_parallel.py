"""Training and evaluation of this rank's part of a model that ``[parallel]`` divides."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.gradients.batch_norm import SyncBatchNorm
from hpctrain.gradients.elementwise import is_known_as
from hpctrain.parallel import shard
from hpctrain.parallel.dtensor import clip_grad_norm_, whole
from hpctrain.parallel.guard import Guard, guard_of, guarded
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.parallel.sharded_optimizer import ShardedOptimizer
from hpctrain.parallel.tensor import tensor_parallel
from hpctrain.train.divided_state import DividedState
from hpctrain.train.model import BuiltModel, division_of
from hpctrain.train.parallel_layout import (
    BatchPadding,
    GradientAverage,
    MicroBatches,
    ParallelLayout,
)
from hpctrain.train.run_config import RunConfig

Loss = Callable[[Tensor, Tensor], Tensor]


class ModelParallel:
    """This rank's part of a divided model, with an optimizer for this part.

    The averaged gradients equal the gradients of the whole batch on one process, because each
    replica's mean loss is weighted by its number of samples. The constructor is collective.

    Args:
        config: configuration of the run.
        built: whole model, identical on all ranks, and optimizer; the model is changed in place.
        layout: mesh of all ranks.

    Raises:
        ConfigError: the model does not support this division; on all ranks.
    """

    def __init__(self, config: RunConfig, built: BuiltModel, layout: ParallelLayout) -> None:
        _check(built.model, built.optimizer)
        self._config, self._layout, self._precision = config.parallel, layout, built.precision
        self._accumulate = config.train.accumulate
        self._padding = BatchPadding(layout, config.train.global_batch)
        self._micro_batches = MicroBatches(
            self._padding, built.loss, built.precision, layout.micro_batches
        )
        self._pipeline: Pipeline | None = None
        self.num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
        self.state = DividedState(built.model, built.optimizer, layout.mesh["pp"])
        self.optimizer: Any = built.optimizer
        self.model = self._divided(built.model)
        self._guard = self._guarded()
        self._average = GradientAverage(layout, self.model, config.comm.bucket_bytes)
        self.state.keep(self.model, self.optimizer)

    def _divided(self, model: nn.Module) -> nn.Module:
        """Apply tensor, context and pipeline parallelism, then shard parameters. Collective."""
        config, mesh = self._config, self._layout.mesh
        if config.tp > 1:
            roles = division_of(model, "roles", config.roles)
            tensor_parallel(model, mesh["tp"], roles, sequence=config.sequence)
        if config.cp > 1:
            divide = getattr(model, "parallel_context", None)
            if divide is None:
                raise ConfigError(
                    f"for parallel.cp = {config.cp}, the model must have a method "
                    f"parallel_context, which gets the mesh that divides the sequence, but "
                    f"{type(model).__name__} has none; add the method (hpctrain guide "
                    f"parallel), or omit cp"
                )
            divide(mesh["cp"])
        if config.pp == 1:
            return self._sharded(model)
        self._pipeline = Pipeline(
            model,
            mesh["pp"],
            division_of(model, "layers", config.layers),
            loss=self._micro_batches.loss,
            num_microbatches=self._layout.micro_batches,
            schedule=config.schedule,
            wrap=self._stage,
        )
        if not config.zero:  # with ZeRO, _stage() has sharded each stage
            return self._sharded(self._pipeline.model)
        return self._pipeline.model

    def _sharded(self, model: nn.Module) -> nn.Module:
        """Create an optimizer for ``model``, this rank's part; shard both if ``zero`` is set.

        Returns ``model``. Collective.
        """
        self.optimizer = self.state.part_of(self.optimizer, model)
        if self._config.zero:
            shard(
                model,
                self.optimizer,
                stage=self._config.zero,
                mesh=self._layout.averaging,
                offload=self._config.offload or None,
            )
        return model

    def _stage(self, stage: nn.Module) -> nn.Module:
        """Shard a pipeline stage if ``zero`` is set; run its forward in ``train.precision``."""
        if self._config.zero:
            self._sharded(stage)
        forward = stage.forward

        def calculate(given: Tensor) -> Tensor:
            with self._precision.autocast():
                found: Tensor = forward(given)
            return found

        stage.forward = calculate
        return stage

    def _guarded(self) -> Guard:
        """Return a guard that compares the steps of ranks with identical parameters."""
        has_one = max(self._config.tp, self._config.pp) > 1 or self._config.zero > 0
        guard = guard_of(self.model) if has_one else guarded(self.model)
        if not self._config.zero:
            averaging = self._layout.averaging
            group, device = averaging.get_group(), averaging.device_type
            guard.add_replicas([group], device, is_averaged=True)
        return guard

    def backward(self, both: tuple[Tensor, Tensor], loss_of: Loss, *, num_samples: int) -> float:
        """Compute the gradients of a replica's part of a global batch. Collective.

        Args:
            both: inputs and labels of this replica; may be empty.
            loss_of: returns the mean loss of inputs and labels; not called with a pipeline.
            num_samples: number of samples in the global batch, over all replicas.

        Returns:
            Mean loss of the replica's samples, on all ranks of the replica; 0 without samples.
        """
        self.optimizer.zero_grad()
        num_own = len(both[0])
        weight = num_own * self._layout.num_replicas / num_samples
        inputs, labels = self._padding.own(*both)
        with loss_parallel():
            if self._pipeline is not None:
                value = self._micro_batches.train(self._pipeline.step, inputs, labels, weight)
            else:
                value = self._in_pieces(inputs, labels, loss_of, weight)
        if self._config.cp > 1:
            group = self._layout.mesh["cp"].get_group()
            dist.all_reduce(value, dist.ReduceOp.AVG, group=group)
        return value.item() / weight if num_own else 0.0

    def _in_pieces(self, inputs: Tensor, labels: Tensor, loss_of: Loss, weight: float) -> Tensor:
        """Run forward and backward of the micro-batches; return the weighted sum of the losses.

        All ranks run the same number of micro-batches, with padding if necessary.
        """
        value, num_own = torch.zeros((), dtype=torch.float64), len(inputs)
        pieces = min(self._accumulate, self._padding.size)
        cut = (values.tensor_split(pieces) for values in (inputs, labels))
        for number, piece in enumerate(zip(*cut, strict=True), 1):
            own = weight * len(piece[0]) / num_own if num_own else 0.0
            optimizer = self.optimizer
            more = number < pieces and isinstance(optimizer, ShardedOptimizer)
            with optimizer.no_sync() if more else nullcontext():
                loss = loss_of(*self._padding.filled(*piece))
                loss.backward(torch.full_like(loss, own))
            value += whole(loss.detach()).to(value) * own
        return value

    def average(self) -> None:
        """Average the gradients of all replicas. Collective."""
        if self._config.zero or self._layout.averaging.size() == 1:
            return
        self._average.run()
        self._guard.mark()

    def output(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return the output of the model for this replica's samples. Collective.

        Only the leading rank of each replica (``ParallelLayout.leads``) returns the output; other
        ranks, and replicas without samples, return None.
        """
        inputs, labels = self._padding.own(inputs, labels)
        found: Tensor | None
        if self._pipeline is None:
            with self._precision.autocast():
                output = whole(self.model(*self._padding.filled(inputs)))
            found = output[: len(inputs)]
        else:
            found = self._micro_batches.outputs(self._pipeline.evaluate, inputs, labels)
        if found is not None and self._config.cp > 1:
            parts = [torch.empty_like(found) for _ in range(self._config.cp)]
            group = self._layout.mesh["cp"].get_group()
            dist.all_gather(parts, found.contiguous(), group=group)
            found = torch.cat(parts, dim=1)
        return found if self._layout.leads and len(inputs) else None

    def clip(self, max_norm: float) -> float:
        """Clip the gradient of the whole model; return its norm before clipping. Collective."""
        if self._pipeline is not None:
            return float(self._pipeline.clip_grad_norm_(max_norm))
        return float(clip_grad_norm_(self.model.parameters(), max_norm))


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` if the model or the optimizer cannot work on a part of the model."""
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise ConfigError(
            "[parallel] must not be used with hpctrain.SyncBatchNorm, which computes statistics "
            "over all ranks, but the model has one; use another norm, or leave [parallel] out"
        )
    if not is_known_as("elementwise", optimizer):
        raise ConfigError(
            f"the optimizer of a divided model must update each element separately, but "
            f"{type(optimizer).__name__} is not known to do so; use AdamW or SGD, or leave "
            f"[parallel] out"
        )
