"""What ``GradScaler`` does to optimizers whose ``.grad`` is not the average of all ranks."""

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from hpctrain.core.torch_compat import replace_unscale_grads, unscale_grads


def unscale_averages(kind: type[Any]) -> None:
    """Let every ``GradScaler`` ask optimizers of a kind, by ``_unscale``, for what it looks at.

    That is called in the place of a look at ``.grad``, with the factor that the gradients are to
    be multiplied by, and returns whether some are not finite. Others are as they were.
    """

    @wraps(unscale_grads)
    def unscale(
        scaler: GradScaler, optimizer: Any, inverse: Tensor, found_inf: Tensor, allow_fp16: Any
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, kind):
            return unscale_grads(scaler, optimizer, inverse, found_inf, allow_fp16)
        found_inf.fill_(optimizer._unscale(inverse.item(), allows_fp16=allow_fp16))  # noqa: SLF001
        return {found_inf.device: found_inf}

    replace_unscale_grads(unscale)


def unscale_own(stepping: Any) -> None:
    """Do what a scaler leaves to an optimizer that steps in any case, to this rank's gradients."""
    found_inf, scale = (getattr(stepping, name, None) for name in ("found_inf", "grad_scale"))
    if found_inf is None:
        return
    stepping.found_inf = stepping.grad_scale = None  # the scaler removes both
    inverse = None if scale is None else scale.double().reciprocal().float()
    for p in (p for group in stepping.param_groups for p in group["params"]):
        if found_inf:
            p.grad = None
        elif p.grad is not None and inverse is not None:
            p.grad.mul_(inverse.to(p.grad.device))
