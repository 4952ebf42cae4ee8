"""``SyncBatchNorm``: batch normalisation over the samples of all ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.core.errors import ConfigError
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.request import Kind, Request, Sum
from hpctrain.runtime import world
from hpctrain.runtime.process_sets import ProcessSet, global_process_set


class SyncBatchNorm(_BatchNorm):
    """Normalises a batch by the mean and variance of the samples of all ranks.

    The result equals the result of one process with all samples, up to rounding.

    In training, and in evaluation without running statistics, forward is collective, and backward
    is collective if the input requires a gradient. Batches may differ in size between ranks and
    may be empty. Gradients of weight and bias are local to this rank; ``DistributedOptimizer``
    combines them. Second derivatives are not supported.

    Gradients flow between the ranks, so a sample must have the same weight in the losses of all
    ranks: if batches differ in size, divide the sum of losses by the same number on every rank.
    ``set_num_samples`` weights gradients only after backward.

    Each rank computes its sums in the dtype of the input, or in float32 for 16-bit inputs. The
    sums of the ranks are combined in float64.

    Args:
        num_features: C of the inputs ``(N, C)`` or ``(N, C, ...)``.
        eps: number that is added to the variance.
        momentum: weight of a batch in the running statistics; None for the mean over all batches.
        affine: whether the layer has weight and bias.
        track_running_stats: whether evaluation uses running statistics.
        process_set: ranks that share statistics; None for all ranks.

    Source: Chan, Golub, LeVeque 1979, for the variance of combined samples.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's
        track_running_stats: bool = True,  # noqa: FBT001, FBT002 - torch's
        process_set: ProcessSet | None = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set or global_process_set

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise ``input`` by the statistics of all ranks, or by the running statistics.

        Raises:
            ConfigError: ``input`` has fewer than two dimensions or another number of features; or
                all ranks together have only one value per feature, so that there is no variance.
        """
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or self.process_set.size() == 1:
            output: Tensor = super().forward(input)
            return output
        self._check_input_dim(input)
        controller = world.current().sets.controller(self.process_set)
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, controller
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, int(count))
        return output

    def _check_input_dim(self, values: Tensor) -> None:
        if values.dim() < 2 or values.size(1) != self.num_features:
            raise ConfigError(
                f"inputs of SyncBatchNorm({self.num_features}) must be (N, {self.num_features}, "
                f"...), got {tuple(values.shape)}"
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running statistics, with the unbiased variance."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        if not count:
            return
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var), momentum)


class _Normalise(Function):
    """Autograd function that returns the output and the statistics over all ranks.

    The statistics are mean, biased variance and number of values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        controller: Controller,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _statistics(values, controller)
        wide = _wide(values)
        scale, shift = (None if part is None else part.to(wide) for part in (weight, bias))
        at = mean.to(wide), variance.to(wide)
        output = functional.batch_norm(values.to(wide), *at, scale, shift, training=False, eps=eps)
        ctx.save_for_backward(values, weight, mean, variance)
        ctx.eps, ctx.controller, ctx.count = eps, controller, count
        number = torch.tensor(count)
        ctx.mark_non_differentiable(mean, variance, number)
        return output.to(values.dtype), mean, variance, number

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, variance = ctx.saved_tensors
        dims, wide = _other_dims(values), _wide(values)
        shape = [-1 if dim == 1 else 1 for dim in range(values.dim())]
        inverse = torch.rsqrt(variance + ctx.eps)
        grad_wide = grad.to(wide)
        normal = (values.to(wide) - mean.to(wide).view(shape)) * inverse.to(wide).view(shape)
        sums = torch.stack([grad_wide.sum(dims), (grad_wide * normal).sum(dims)])
        grad_bias, grad_weight = sums
        grad_input = None
        if ctx.needs_input_grad[0]:
            means = _summed(sums, ctx.controller).to(wide) / max(ctx.count, 1)
            scale = inverse.to(wide) if weight is None else inverse.to(wide) * weight.to(wide)
            centred = grad_wide - means[0].view(shape) - normal * means[1].view(shape)
            grad_input = (centred * scale.view(shape)).to(values.dtype)
        return (
            grad_input,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _statistics(values: Tensor, controller: Controller) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance of each feature over all ranks, and the number of values.

    Collective. Results are in float64. All ranks combine the same statistics in the same order.
    If there is only one value per feature, all ranks raise ``ConfigError``.
    """
    features = values.size(1)
    count = values.numel() // features if features else 0
    own = torch.zeros(1, 2 * features + 1, dtype=torch.float64)
    if count:
        variance, mean = torch.var_mean(
            values.to(_wide(values)), _other_dims(values), correction=0
        )
        own[0, 0] = count
        own[0, 1 : features + 1] = mean
        own[0, features + 1 :] = variance
    # Layers with the same number of features use the same request name, so that one cached name
    # serves any number of layers. A layer waits for its result before the next layer submits the
    # name.
    request = Request(Kind.ALLGATHER, f"SyncBatchNorm.statistics.{features}", [own])
    (parts,) = controller.run(request)
    counts, means, variances = parts.split([1, features, features], dim=1)
    total = int(counts.sum())
    if total == 1:
        raise ConfigError(
            "batch normalisation must have more than one value per feature on all ranks together, "
            "got 1; use a larger batch, or eval()"
        )
    shares = counts / max(total, 1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean) ** 2)).sum(0)
    return mean.to(values.device), variance.to(values.device), total


def _summed(sums: Tensor, controller: Controller) -> Tensor:
    """Return ``sums`` added over all ranks, in float64. Collective."""
    name = f"SyncBatchNorm.sums.{sums.size(1)}"
    own = sums.to("cpu", torch.float64, copy=True)
    (total,) = controller.run(Request(Kind.ALLREDUCE, name, [own], in_place=True, op=Sum))
    assert isinstance(total, Tensor)
    return total.to(sums.device)


def _wide(values: Tensor) -> torch.dtype:
    """Return the dtype for computations with ``values``."""
    return torch.float32 if values.itemsize < 4 else values.dtype


def _other_dims(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]
