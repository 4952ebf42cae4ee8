"""Activation checkpointing, complete or selective."""

from collections.abc import Callable, Sequence
from functools import partial
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

EXPENSIVE = ("mm", "addmm", "convolution")
"""Operators whose results selective recomputation stores, in addition to fused attention."""


def recompute(model: nn.Module, blocks: Sequence[str], *, selective: bool = False) -> nn.Module:
    """Store only the inputs of blocks, and repeat their forward during backward.

    Not collective, but backward repeats the communication of the blocks' forward. Call this
    function after ``tensor_parallel``, and before ``fully_shard`` and ``Pipeline``. Names and
    values of parameters do not change; the repeated forward draws the same random numbers.

    Args:
        model: model, changed in place.
        blocks: names of modules; ``*`` matches a part of a dotted name: ``["blocks.*"]``.
        selective: whether to store also the results of weight matrices and fused attention, so
            that only cheap operations are repeated: norms, activations, unfused scores.

    Returns:
        The model.

    Raises:
        ConfigError: a name matches no module.

    Source: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198.
    """
    for block in matching(model, blocks).values():
        inner = vars(block).get("forward")  # set on the instance by some tools
        if isinstance(inner, _Recomputed):
            inner = inner.inner
        block.forward = _Recomputed(block, inner, selective=selective)
    return model


def selective_in(model: nn.Module) -> list[str]:
    """Return the names of modules with selective recomputation."""
    named = ((name, vars(module).get("forward")) for name, module in model.named_modules())
    return [name for name, one in named if isinstance(one, _Recomputed) and one.selective]


class _Recomputed:
    """Forward function with activation checkpointing; a class, so that modules can be pickled."""

    def __init__(
        self, block: nn.Module, inner: Callable[..., Any] | None, *, selective: bool
    ) -> None:
        self.block, self.inner, self.selective = block, inner, selective

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = self.inner or type(self.block).forward.__get__(self.block)
        if self.selective:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(forward, *args, use_reentrant=False, **options)


def _policy(
    _: SelectiveCheckpointContext, operator: Any, *__: Any, **___: Any
) -> CheckpointPolicy:
    name = operator.name().partition(".")[0].removeprefix("aten::")
    fused = name.startswith("_scaled_dot_product") and "backward" not in name
    keep = isinstance(operator, Operator) and (name in EXPENSIVE or fused)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
