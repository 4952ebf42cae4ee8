"""Norms of tensors, without overflow or underflow of squares.

The square of a float32 overflows above 1.8e19 and underflows below 1e-19. Norms are still computed
in float32, since float64 takes two to four times as long. Norms whose value shows that they may be
wrong are computed again in float64.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hpctrain.core.torch_compat import foreach_norm

_MIN_SUM = 2.0**-100
"""Powers that underflow are negligible in a sum above this value."""


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norms of tensors of one device and dtype, in float64 on the CPU."""
    wide = torch.float32 if tensors[0].dtype.itemsize < 4 else None
    found = torch.stack(foreach_norm([*tensors], 2, wide)).to("cpu", torch.float64)
    for index in _needs_float64(found).nonzero().flatten().tolist():
        found[index] = torch.linalg.vector_norm(tensors[index], dtype=torch.float64)
    return found


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row in float64."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=1).double()
    doubtful = _needs_float64(found)
    if doubtful.any():
        found[doubtful] = torch.linalg.vector_norm(rows[doubtful], dim=1, dtype=torch.float64)
    return found


def total_norm(
    gradients: Sequence[Tensor],
    order: float = 2.0,
    whole: Callable[[Tensor], Tensor] = torch.clone,
) -> Tensor:
    """Return the norm of all gradients, as ``torch.nn.utils.get_total_norm`` does.

    Computed in float64 if the norm exceeds the range of the dtype.

    Args:
        gradients: the tensors.
        order: order of the norm.
        whole: converts the norm to a plain tensor that is the same on all ranks. If tensors are
            divided over ranks, ``whole`` communicates, and the call is collective.

    Returns:
        The norm, in the dtype of the gradients if that can represent the norm, otherwise in
        float64.
    """
    found = whole(get_total_norm(gradients, order))
    if not gradients or not _needs_float64(found, order):
        return found
    each = [whole(get_total_norm([gradient.double()], order)).cpu() for gradient in gradients]
    exact: Tensor = torch.linalg.vector_norm(torch.stack(each), order)
    rounded = exact.to(found)
    return rounded if rounded.isfinite() or not exact.isfinite() else exact


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    order: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip gradients to ``max_norm``; return ``total_norm`` of the gradients before clipping.

    Replaces ``torch.nn.utils.clip_grad_norm_``.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    total = total_norm([p.grad for p in held if p.grad is not None], order)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {order} of the averaged gradients must be finite to clip them, "
            f"got {float(total)}; skip this step on all ranks"
        )
    clip_grads_with_norm_(held, max_norm, total)
    return total


def _needs_float64(found: Tensor, order: float = 2.0) -> Tensor:
    """Return True for each norm that is not finite, or so small that powers may underflow."""
    least = _MIN_SUM ** (1.0 / order) if 0.0 < order < math.inf else 0.0
    return ~((found >= least) & found.isfinite())


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum of ``values``, rounded once; NaN on overflow or for inf - inf."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
