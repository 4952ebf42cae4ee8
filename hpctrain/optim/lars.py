"""LARS: momentum SGD whose rate for each tensor follows the norms of weights and gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hpctrain.comm.norms import norms
from hpctrain.core.checks import Decay, Positive, checked, require
from hpctrain.core.torch_compat import foreach_add, foreach_add_, foreach_mul_, foreach_sub_
from hpctrain.optim.adaptive import AdaptiveOptimizer, Tensors, multiply_, ratios


class LARS(AdaptiveOptimizer):
    """Layer-wise adaptive rate scaling.

    Of each tensor w with gradient g::

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w|)      1 if |w| or |g| is 0
        v = momentum * v + lr * ratio * (g + weight_decay * w)
        w = w - v

    So the rate is inside the momentum, as in the paper, and when it changes v still has the old
    one for some 1 / (1 - momentum) steps. ``momentum_correction`` multiplies v by the new rate
    over the old one, which is the same as to keep the rate outside, as ``torch.optim.SGD`` and
    most implementations do, and so it is calculated::

        v = momentum * v + ratio * (g + weight_decay * w)
        w = w - lr * v

    With Nesterov momentum the step is ``momentum * v`` plus what was just added to v.

    Sources: You, Gitman and Ginsburg 2017, arXiv:1708.03888; the correction: Goyal et al. 2017,
    arXiv:1706.02677, section 3. That large batches need LARS at all is disputed: Nado et al.
    2021, arXiv:2102.06356, reach the same with tuned Nesterov momentum.

    Args:
        params: parameters, or groups of them; ``exclusions(model)`` makes usual ones.
        lr: learning rate of the global batch, the paper's gamma: far above that of SGD.
        momentum: share of the last step in the next one, below 1.
        weight_decay: share of the weights that is added to the gradient, inside the ratio.
        trust_coefficient: the paper's eta: length of a step by that of the weights.
        nesterov: whether momentum is Nesterov's.
        momentum_correction: whether the momentum follows the rate.
        adapt: False for a ratio of 1, as groups of biases and norms have.

    Raises:
        ConfigError: an argument is not valid.
    """

    tensorwise = True
    """What a step looks at, for ``shard="node"``."""

    def __init__(  # noqa: PLR0913 - what a group can have
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
        """Raise ``ConfigError`` unless the arguments of a group are valid."""
        momentum = checked("momentum", group["momentum"], Decay)
        checked("trust_coefficient", group["trust_coefficient"], Positive)
        require(not group["nesterov"] or momentum, "nesterov needs a momentum above 0", momentum)

    def state_names(self, group: Mapping[str, Any]) -> Sequence[str]:
        """Name the momentum, where there is one."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self, group: Mapping[str, Any], params: Tensors, grads: Tensors, *state: Tensors
    ) -> None:
        """Step on tensors of one device and dtype."""
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
