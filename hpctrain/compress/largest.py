"""Sparse codecs, which send the values of largest magnitude with their indices."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hpctrain.comm.communicator import Internode
from hpctrain.comm.norms import norms
from hpctrain.compress.rail_codec import CodedShare, RailCodec, exchanged
from hpctrain.core.checks import Bounds, Count, Fraction, Positive, checked


class Sparse(RailCodec):
    """Base class of codecs that send the largest values; subclasses implement ``reduce_``.

    Every rank sends the fraction ``density`` of its values, with a four-byte index for each value,
    to all other ranks. The bytes of this all-gather grow with the number of nodes.

    Args:
        density: fraction of the values to send.
    """

    def __init__(self, density: float) -> None:
        super().__init__()
        checked("density", density, Fraction)
        self._density = density

    def density_at(self, step: int) -> float:  # noqa: ARG002 - for subclasses
        """Return the fraction of values to send in step ``step``, counted from 0."""
        return self._density

    def bytes_of(self, share: CodedShare) -> int:
        """Return the size of the next message in bytes, eight per sent value for float32."""
        return self._num_sent(share) * (4 + share.dtype.itemsize)

    def send_largest(
        self, share: CodedShare, wanted: Tensor, result: Tensor, link: Internode
    ) -> Tensor:
        """Send the largest values in ``wanted``, and set ``result`` to the sum of all sent values.

        Collective over ``link``.

        Returns:
            The indices of the values that this rank has sent.
        """
        places = largest(wanted, self._num_sent(share))
        values = wanted[places]
        packet = torch.cat([values.view(torch.uint8), places.int().view(torch.uint8)])
        arrived = exchanged(link, [packet] * link.size, [len(packet)] * link.size)
        result.zero_()
        for other in arrived:
            sent, found = other[: values.nbytes], other[values.nbytes :]
            result.index_add_(0, found.view(torch.int32), sent.view(values.dtype))
        return places

    def _num_sent(self, share: CodedShare) -> int:
        return max(round(share.numel * self.density_at(share.num_steps)), 1)


def largest(values: Tensor, number: int) -> Tensor:
    """Return the indices of the ``number`` values of largest magnitude, in increasing order.

    A sample of the values determines a threshold; only values above the threshold are sorted. NaN
    counts as largest.
    """
    magnitudes = values.abs()
    candidates = None
    if len(values) > _SAMPLE and 8 * number < len(values):
        sample = magnitudes[:: len(values) // _SAMPLE]
        wanted = min(2 * number * len(sample) // len(values) + 8, len(sample))
        threshold = sample.topk(wanted, sorted=False).values.min()
        candidates = torch.logical_not(magnitudes < threshold).nonzero().squeeze(1)
    if candidates is None or len(candidates) < number:
        return magnitudes.topk(number, sorted=False).indices.sort().values
    chosen = magnitudes[candidates].topk(number, sorted=False).indices
    return candidates[chosen].sort().values


_SAMPLE = 1 << 14


class TopK(Sparse):
    """Codec that sends the largest values, and adds unsent values in the next step.

    Args:
        density: fraction of the values to send.
        error_feedback: whether unsent values are added in the next step. Without error feedback,
            small values are lost, and training converges to another result.

    Source: Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with memory".
    """

    def __init__(self, density: float = 0.01, *, error_feedback: bool = True) -> None:
        super().__init__(density)
        checked("error_feedback", error_feedback, bool)
        self.keeps_unsent = error_feedback

    @override
    def warning(self, optimizer: Optimizer) -> str:
        """Return a warning if the codec loses small values; see ``Codec``."""
        if self.keeps_unsent or self._density == 1.0:
            return ""
        return (
            "error feedback should be used, because without it values that are never among the "
            "largest are never sent, and training converges to another result, got "
            "error_feedback=False; use error_feedback=True"
        )

    def reduce_(self, share: CodedShare, values: Tensor, link: Internode) -> None:
        """Add the unsent values of earlier steps, and send the largest; see ``RailCodec``."""
        if not self.keeps_unsent:
            self.send_largest(share, values.clone(), values, link)
            return
        error = share.remembered("error").add_(values)
        error[self.send_largest(share, error, values, link)] = 0.0


class DeepGradientCompression(Sparse):
    """Codec that sends the largest accumulated momenta; vectors are summed exactly.

    The codec applies the momentum, so the optimizer must have momentum 0. When an element is sent,
    its accumulated value and its momentum are reset to 0. Gradients may be clipped before they are
    accumulated.

    Args:
        density: fraction of the values to send after the warm-up.
        momentum: factor of the momentum, 0 to 1; also applied to values that are summed exactly,
            such as biases.
        clip_norm: maximum norm of the sum of all nodes. Each node clips its gradients to this
            norm divided by the square root of the number of nodes. None for no clipping.
        masks_momentum: whether the momentum of sent values is reset. With density 1, True disables
            the momentum, and False gives SGD with momentum.
        warmup: densities of the first steps, each used for ``warmup_steps`` steps.
        warmup_steps: number of steps with each density of ``warmup``; 0 for no warm-up.

    Source: Lin et al. 2018, "Deep gradient compression".
    Differs: the norm is computed over a slice of a bucket.
    """

    keeps_unsent, unsent = True, "sum"

    def __init__(
        self,
        density: float = 0.001,
        momentum: float = 0.9,
        *,
        clip_norm: float | None = None,
        masks_momentum: bool = True,
        warmup: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004),
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(density)
        checked("warmup_steps", warmup_steps, Count)
        checked("masks_momentum", masks_momentum, bool)
        for each in warmup:
            checked("density", each, Fraction)
        checked("momentum", momentum, Annotated[float, Bounds(least=0, most=1)])
        checked("clip_norm", clip_norm, Positive | None)
        self._momentum, self._clip_norm, self._masks = momentum, clip_norm, masks_momentum
        self._warmup, self._warmup_steps = tuple(warmup), warmup_steps

    def density_at(self, step: int) -> float:
        """Return the fraction of values to send in step ``step``, counted from 0."""
        stage = step // self._warmup_steps if self._warmup_steps else len(self._warmup)
        return self._warmup[stage] if stage < len(self._warmup) else self._density

    def warning(self, optimizer: Optimizer) -> str:
        """Return a warning if the optimizer applies momentum, too; see ``Codec``."""
        if not any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
            return ""
        return (
            f"the optimizer should have no momentum, because the codec applies momentum, got "
            f"{type(optimizer).__name__} with momentum; use SGD with momentum=0"
        )

    def is_exact(self, tensor: Tensor) -> bool:
        """Return True for vectors; see ``RailCodec``."""
        return tensor.dim() < 2

    def reduce_(self, share: CodedShare, values: Tensor, link: Internode) -> None:
        """Accumulate momenta, and send the largest sums; see ``RailCodec``."""
        momenta, sums = share.remembered("momentum"), share.remembered("sum")
        if self._clip_norm is not None:
            [norm] = norms([values]).tolist()
            values.mul_(min(self._clip_norm * link.size**-0.5 / (norm + 1e-6), 1.0))
        momenta.mul_(self._momentum).add_(values)
        sums.add_(momenta)
        sent = self.send_largest(share, sums, values, link)
        sums[sent] = 0.0
        if self._masks:
            momenta[sent] = 0.0

    def after_exact(self, share: CodedShare, values: Tensor) -> None:
        """Apply the momentum to values that are not encoded; see ``RailCodec``."""
        momenta = share.memory.setdefault("exact momentum", torch.zeros_like(values))
        values.copy_(momenta.mul_(self._momentum).add_(values))
