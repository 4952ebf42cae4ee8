"""Support for ``GradScaler`` if the averaged gradients of an optimizer are not in ``.grad``."""

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from hpctrain.core.torch_compat import replace_unscale_grads, unscale_grads
from hpctrain.gradients.optimizer_exchange import exchange_of


def unscale_by_exchange() -> None:
    """Make ``GradScaler`` call ``OptimizerExchange.unscale`` for a ``DistributedOptimizer``.

    The averaged gradients of a ``DistributedOptimizer`` may not be in ``.grad``. For all other
    optimizers, ``GradScaler`` unscales ``.grad`` as before.
    """

    @wraps(unscale_grads)
    def unscale(
        scaler: GradScaler, optimizer: Any, inverse: Tensor, found_inf: Tensor, allow_fp16: Any
    ) -> dict[torch.device, Tensor]:
        exchange = exchange_of(optimizer)
        found = exchange.unscale(inverse, allows_fp16=allow_fp16) if exchange else None
        if found is None:
            return unscale_grads(scaler, optimizer, inverse, found_inf, allow_fp16)
        found_inf.fill_(found)
        return {found_inf.device: found_inf}

    replace_unscale_grads(unscale)


def unscale_own(stepping: Any) -> None:
    """Unscale this rank's gradients instead of ``GradScaler``; after an overflow, drop them."""
    found_inf, scale = (getattr(stepping, name, None) for name in ("found_inf", "grad_scale"))
    if found_inf is None:
        return
    stepping.found_inf = stepping.grad_scale = None  # the scaler deletes both attributes
    inverse = None if scale is None else scale.double().reciprocal().float()
    for p in (p for group in stepping.param_groups for p in group["params"]):
        if found_inf:
            p.grad = None
        elif p.grad is not None and inverse is not None:
            p.grad.mul_(inverse.to(p.grad.device))
