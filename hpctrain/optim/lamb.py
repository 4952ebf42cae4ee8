"""LAMB, a variant of Adam that scales the step of each tensor by the norm of its weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hpctrain.comm.norms import norms
from hpctrain.core.checks import AtLeast0, checked, require
from hpctrain.core.torch_compat import (
    foreach_add_,
    foreach_addcmul_,
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_div,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
    foreach_sub_,
)
from hpctrain.optim.adaptive import AdaptiveOptimizer, Tensors, multiply_, ratios

_BELOW = 1 - 2**-10  # factor that keeps averages of the largest squares finite


class LAMB(AdaptiveOptimizer):
    """Optimizer with layer-wise adaptive moments.

    For each tensor w, with the bias-corrected moments m and v of Adam::

        r = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * phi(|w|) / |r| * r                       phi / |r| is 1 if either is 0

    Some implementations first clip the total norm of the gradients to 1; for this, call
    ``torch.nn.utils.clip_grad_norm_`` or set ``train.clip_norm``. A step clamps gradients, in
    place, so that their squares are finite: in float32, to absolute values up to 1.8e19.

    Source: You et al. 2020, arXiv:1904.00962, algorithm 2. Nado et al. 2021, arXiv:2102.06356,
    dispute that large batches need LAMB: tuned Adam reaches the same accuracy.

    Args:
        params: parameters or parameter groups; ``exclusions(model)`` makes the usual groups.
        lr: learning rate: the norm of a step divided by the norm of the weights.
        betas: decay factors of m and v per step, each at least 0 and below 1.
        eps: number that is added to the root of the second moment.
        weight_decay: factor of the weights w in r.
        bias_correction: whether to correct the bias of the moments toward 0, as in Adam.
        phi: smallest and largest value of phi(|w|), to which |w| is clamped; None for no bounds.
        adapt: whether steps are scaled by phi / |r|; False for a factor of 1, as is usual for
            biases and normalization layers.

    Raises:
        ConfigError: an argument is not valid.
    """

    tensorwise = True
    """Declares that each tensor is updated separately, as ``shard="node"`` requires."""

    def __init__(  # noqa: PLR0913 - arguments of a group
        self,
        params: ParamsT,
        lr: float,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        phi: Sequence[float] | None = None,
        adapt: bool = True,
    ) -> None:
        moments = {"betas": betas, "eps": eps, "bias_correction": bias_correction}
        super().__init__(params, lr=lr, weight_decay=weight_decay, phi=phi, adapt=adapt, **moments)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` unless the arguments of a parameter group are valid."""
        betas, phi = group["betas"], group["phi"]
        is_pair = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        require(is_pair, "betas must be two numbers, each at least 0 and below 1", betas)
        checked("eps", group["eps"], AtLeast0)
        is_range = phi is None or (len(phi) == 2 and 0 <= phi[0] <= phi[1] and phi[1] > 0)
        rule = "phi must be None, or the smallest and largest norm, each at least 0"
        require(is_range, rule, phi)

    def state_names(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of the state entries, as in ``torch.optim.Adam``."""
        del group
        return "step", "exp_avg", "exp_avg_sq"

    def update(
        self, group: Mapping[str, Any], params: Tensors, grads: Tensors, *state: Tensors
    ) -> None:
        """Update parameters of one device and dtype, and their state, in place."""
        steps, first, second = state
        beta1, beta2 = group["betas"]
        # Squares of gradients above 1e19 overflow. The gradients are limited in place, so that
        # both moments are computed from the same gradients.
        largest = math.sqrt(torch.finfo(second[0].dtype).max) * _BELOW
        foreach_clamp_max_(grads, largest)
        foreach_clamp_min_(grads, -largest)
        foreach_add_(steps, 1.0)
        foreach_lerp_(first, grads, 1 - beta1)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, grads, grads, 1 - beta2)

        counts = [step.item() if group["bias_correction"] else math.inf for step in steps]
        free = [1 - beta1**count for count in counts]
        free_second = [math.sqrt(1 - beta2**count) for count in counts]
        eps = group["eps"] or torch.finfo(params[0].dtype).tiny
        below = list(foreach_sqrt(second))
        foreach_mul_(below, [a / b for a, b in zip(free, free_second, strict=True)])
        foreach_add_(below, [eps * each for each in free])
        moved = list(foreach_div(first, below))
        foreach_add_(moved, params, alpha=group["weight_decay"])

        lr = float(group["lr"])
        factors = torch.full((len(params),), lr, dtype=torch.float64)
        if group["adapt"]:
            of_weights, of_steps = norms(params), norms(moved)
            if group["phi"]:
                of_weights = of_weights.clamp(*group["phi"])
            factors = ratios(of_weights, of_steps, of_steps) * lr
        multiply_(moved, factors)
        foreach_sub_(params, moved)
