"""Activations that backward computes again instead of keeping them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hpctrain.core.torch_compat import Operator
from hpctrain.parallel.split import matching

DEAR = ("mm", "addmm", "convolution")
"""What selective recomputation keeps, by the names of torch's operators, and fused attention."""


def recompute(model: nn.Module, blocks: Sequence[str], *, selective: bool = False) -> nn.Module:
    """Keep of some modules only what they are given, until backward computes the rest again.

    Not collective, but what the modules exchange in forward they exchange again in backward. Call
    it behind ``tensor_parallel``, and before ``fully_shard`` and ``Pipeline``. Names and values of
    parameters stay, random numbers are drawn again as they were.

    Args:
        model: changed in place.
        blocks: names of modules, in which ``*`` stands for any part: ``["blocks.*"]``.
        selective: keep also what matrices of weights and fused attention return, so that only what
            is cheap is computed again: norms, activations, scores that are not fused.

    Returns:
        The model.

    Raises:
        ConfigError: there is no such module.

    Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198.
    """
    for block in matching(model, blocks).values():
        inner = vars(block).get("forward")  # of this object alone, as some tools leave one
        if isinstance(inner, _Recomputed):
            inner = inner.inner
        block.forward = _Recomputed(block, inner, selective=selective)
    return model


def selective_in(model: nn.Module) -> list[str]:
    """Return the names of the modules that keep what is dear."""
    named = ((name, vars(module).get("forward")) for name, module in model.named_modules())
    return [name for name, one in named if isinstance(one, _Recomputed) and one.selective]


class _Recomputed:
    """A forward that keeps less; of a class, so that modules can be pickled."""

    def __init__(
        self, block: nn.Module, inner: Callable[..., Any] | None, *, selective: bool
    ) -> None:
        self.block, self.inner, self.selective = block, inner, selective

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = self.inner or type(self.block).forward.__get__(self.block)
        if self.selective:
            options["context_fn"] = _selective
        return checkpoint(forward, *args, use_reentrant=False, **options)


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(
    _: SelectiveCheckpointContext, operator: Any, *__: Any, **___: Any
) -> CheckpointPolicy:
    name = operator.name().partition(".")[0].removeprefix("aten::")
    fused = name.startswith("_scaled_dot_product") and "backward" not in name
    keep = isinstance(operator, Operator) and (name in DEAR or fused)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
