"""PowerSGD, which approximates matrices by low-rank factors that can be summed."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from hpctrain.comm.communicator import Internode
from hpctrain.comm.tensor_bucket import PackedTensors
from hpctrain.compress.rail_codec import CodedShare, CodedTensor, RailCodec
from hpctrain.core.checks import AtLeast0, Count, Number, checked

_SEED = 0x9E3779B9
_SMALLER = 2.0**-64  # factor of values whose products overflow


class PowerSGD(RailCodec):
    """Codec that sends two factors of ``rank`` columns for each matrix, by power iteration.

    The first dimension of a tensor is the row dimension; the other dimensions are flattened.
    Vectors, and matrices for which the factors are not smaller, are summed exactly. Each rail
    sends whole matrices. The approximation error is added in the next step. The method is linear:
    K nodes give the same result as one node with the mean of their gradients.

    Args:
        rank: rank of the approximation.
        warmup_steps: number of steps at the start in which gradients are summed exactly.
        min_gain: minimum ratio of the sizes of matrix and factors; matrices with a smaller ratio
            are summed exactly.
        warm_start: whether a step starts from the factor of the previous step. Without a warm
            start, the approximation is worse than the best approximation of the same rank.
        error_feedback: whether the approximation error is added in the next step.

    Source: Vogels, Karimireddy and Jaggi 2019, "PowerSGD: practical low-rank gradient compression
    for distributed optimization".
    Differs: the factors are orthogonalised by QR, whose result is bitwise identical on all ranks
    if their processors are identical; the comparison of weights between ranks detects a
    difference.
    """

    takes_tensors = True

    def __init__(
        self,
        rank: int = 4,
        *,
        warmup_steps: int = 0,
        min_gain: float = 2.0,
        warm_start: bool = True,
        error_feedback: bool = True,
    ) -> None:
        super().__init__()
        checked("rank", rank, Number)
        checked("warmup_steps", warmup_steps, Count)
        checked("warm_start", warm_start, bool)
        checked("error_feedback", error_feedback, bool)
        checked("min_gain", min_gain, AtLeast0)
        self._rank, self._warmup_steps, self._min_gain = rank, warmup_steps, min_gain
        self._warm_start, self.keeps_unsent = warm_start, error_feedback

    def is_exact(self, tensor: Tensor) -> bool:
        """Return True for vectors, and for matrices whose factors are too large to save bytes."""
        if tensor.dim() < 2 or not tensor.numel():
            return True
        rows, columns = len(tensor), tensor.numel() // len(tensor)
        thin = min(self._rank, rows, columns) * (rows + columns)
        return thin * self._min_gain > tensor.numel()

    def bytes_of(self, share: CodedShare) -> int:
        """Return the size of both factors in bytes; see ``RailCodec``."""
        shapes = [(place.numel // place.row, place.row) for place in share.places]
        thin = sum((rows + columns) * self._width(rows, columns) for rows, columns in shapes)
        return thin * share.dtype.itemsize

    def reduce_(self, share: CodedShare, values: Tensor, link: Internode) -> None:
        """Sum both factors of each matrix, one after the other; see ``RailCodec``."""
        if share.num_steps < self._warmup_steps:
            link.allreduce_(values).wait()
            return
        wanted = values
        if self.keeps_unsent:
            wanted = share.remembered("error").add_(values)
        groups = _by_shape(share.places)
        left, right = self._thin(share, wanted, groups, link)
        # If a product overflows on one rank, the sums are infinite on all ranks.
        overflows = not all(thin.isfinite().all() for thin in right)
        if overflows:
            left, right = self._thin(share, wanted * _SMALLER, groups, link)
        if self._warm_start:
            share.memory["right"] = torch.cat([thin.reshape(-1) for thin in right])
        for places, thin_left, thin_right in zip(groups, left, right, strict=True):
            for place, *thin in zip(places, thin_left, thin_right, strict=True):
                torch.mm(*thin, out=_matrix(values, place))
        if overflows:
            values.div_(_SMALLER)
        if self.keeps_unsent:
            wanted.sub_(values, alpha=1 / link.size)

    def _thin(
        self,
        share: CodedShare,
        wanted: Tensor,
        groups: Sequence[list[CodedTensor]],
        link: Internode,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return both factors of the sums over ``link``, by group of equal shapes. Collective."""
        batches = [(places, _stacked(wanted, places)) for places in groups]
        right = self._right(share, batches)
        left = [_times(each, thin) for (_, each), thin in zip(batches, right, strict=True)]
        left = [torch.linalg.qr(thin)[0] for thin in _summed(left, link)]
        right = [thin.mT @ each for (_, each), thin in zip(batches, left, strict=True)]
        return left, _summed(right, link)

    def _right(
        self, share: CodedShare, batches: Sequence[tuple[Sequence[CodedTensor], Tensor]]
    ) -> list[Tensor]:
        """Return the orthogonal columns from which the iteration starts, for each batch.

        These are the columns of the previous step, or random columns in the first step.
        """
        shapes = [(len(m), self._width(*m.shape[1:]), m.shape[2]) for _, m in batches]
        sizes = [math.prod(shape) for shape in shapes]
        flat = share.memory.get("right")
        if flat is None or len(flat) != sum(sizes) or not flat.any():  # ``rank`` may have changed
            generator = torch.Generator().manual_seed(_SEED + share.num_steps)
            drawn = [
                torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
            ]
        else:
            drawn = [
                _safe(each).view(shape)
                for each, shape in zip(flat.split(sizes), shapes, strict=True)
            ]
        return [torch.linalg.qr(each.mT)[0].to(share.dtype) for each in drawn]

    def _width(self, rows: int, columns: int) -> int:
        return min(self._rank, rows, columns)


def _safe(columns: Tensor) -> Tensor:
    """Return columns scaled so that their norms do not overflow; directions do not change."""
    return columns * _SMALLER if columns.abs().max() > 1 / _SMALLER else columns


def _by_shape(places: Sequence[CodedTensor]) -> list[list[CodedTensor]]:
    """Return groups of matrices of the same shape."""
    batches: dict[tuple[int, int], list[CodedTensor]] = {}
    for place in places:
        batches.setdefault((place.numel, place.row), []).append(place)
    return list(batches.values())


def _times(matrices: Tensor, thin: Tensor) -> Tensor:
    """Return ``matrices @ thin``.

    Padding 4 columns to 16 halves the time of the matrix product.
    """
    width = thin.shape[-1]
    return (matrices @ pad(thin, (0, -width % 16)))[..., :width]


def _stacked(values: Tensor, places: Sequence[CodedTensor]) -> Tensor:
    """Return matrices of one shape as a batch; a view if the matrices are adjacent."""
    first, row = places[0].first, places[0].row
    if all(one.end == other.first for one, other in pairwise(places)):
        return values[first : places[-1].end].view(len(places), -1, row)
    return torch.stack([_matrix(values, place) for place in places])


def _matrix(values: Tensor, place: CodedTensor) -> Tensor:
    return values[place.first : place.first + place.numel].view(-1, place.row)


def _summed(thin: list[Tensor], link: Internode) -> list[Tensor]:
    """Return matrices summed over ``link``, in one message. Collective."""
    packed = PackedTensors.copied(thin)
    link.allreduce_(packed.flat).wait()
    return packed.places
