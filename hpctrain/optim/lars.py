"""LARS, a variant of SGD that scales the rate of each tensor by weight and gradient norms."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hpctrain.comm.norms import norms
from hpctrain.core.checks import Decay, Positive, checked, require
from hpctrain.core.torch_compat import foreach_add, foreach_add_, foreach_mul_, foreach_sub_
from hpctrain.optim.adaptive import AdaptiveOptimizer, Tensors, multiply_, ratios


class LARS(AdaptiveOptimizer):
    """SGD with momentum and layer-wise adaptive rate scaling.

    For each tensor w with gradient g::

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w|)      1 if |w| or |g| is 0
        v = momentum * v + lr * ratio * (g + weight_decay * w)
        w = w - v

    As in the paper, v includes the learning rate, so that after a change of the rate, v depends on
    the old rate for about 1 / (1 - momentum) further steps. ``momentum_correction`` multiplies v
    by the new rate divided by the old rate. This is equivalent to a rate outside of v, as in
    ``torch.optim.SGD`` and most implementations, and is computed as::

        v = momentum * v + ratio * (g + weight_decay * w)
        w = w - lr * v

    With Nesterov momentum, w is reduced by ``momentum * v`` plus the last term of the formula of
    v, instead of v.

    Sources: You, Gitman and Ginsburg 2017, arXiv:1708.03888; the correction: Goyal et al. 2017,
    arXiv:1706.02677, section 3. Nado et al. 2021, arXiv:2102.06356, dispute that large batches
    need LARS: tuned Nesterov momentum reaches the same accuracy.

    Args:
        params: parameters or parameter groups; ``exclusions(model)`` makes the usual groups.
        lr: learning rate for the global batch, gamma in the paper; much larger than for SGD.
        momentum: factor of v per step, at least 0 and below 1.
        weight_decay: factor of the weights w in both formulas.
        trust_coefficient: factor of the ratio, eta in the paper.
        nesterov: whether to use Nesterov momentum.
        momentum_correction: whether to correct v after changes of the rate.
        adapt: whether steps are scaled by the ratio; False for a ratio of 1, as is usual for
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
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        nesterov: bool = False,
        momentum_correction: bool = False,
        adapt: bool = True,
    ) -> None:
        options = {"nesterov": nesterov, "momentum_correction": momentum_correction}
        ratio = {"trust_coefficient": trust_coefficient, "adapt": adapt}
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, **options, **ratio
        )

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` unless the arguments of a parameter group are valid."""
        momentum = checked("momentum", group["momentum"], Decay)
        checked("trust_coefficient", group["trust_coefficient"], Positive)
        require(
            not group["nesterov"] or momentum,
            "momentum must be above 0 with nesterov=True",
            momentum,
            "set momentum, or leave nesterov out",
        )

    def state_names(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Return the name of the momentum buffer; empty without momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self, group: Mapping[str, Any], params: Tensors, grads: Tensors, *state: Tensors
    ) -> None:
        """Update parameters of one device and dtype, and their state, in place."""
        lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        inside, outside = (1.0, lr) if group["momentum_correction"] else (lr, 1.0)
        factors = torch.full((len(params),), inside, dtype=torch.float64)
        if group["adapt"]:
            of_weights, of_grads = norms(params), norms(grads)
            ratio = ratios(
                group["trust_coefficient"] * of_weights, of_grads, of_grads + decay * of_weights
            )
            factors = ratio * inside
        added = list(foreach_add(grads, params, alpha=decay))
        multiply_(added, factors)
        if momentum:
            [buffers] = state
            foreach_mul_(buffers, momentum)
            foreach_add_(buffers, added)
            if group["nesterov"]:
                foreach_add_(added, buffers, alpha=momentum)
            else:
                added = buffers
        foreach_sub_(params, added, alpha=outside)
