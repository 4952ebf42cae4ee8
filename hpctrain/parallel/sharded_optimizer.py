"""Optimizer of a sharded model: checks before a step, clipping, gradient accumulation."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import average_unused_parameters
from hpctrain.parallel.dtensor import clip_grad_norm_, local
from hpctrain.parallel.guard import guard_of
from hpctrain.parallel.offload import FileState
from hpctrain.parallel.split import places_of


class ShardedOptimizer(Optimizer):
    """Methods and checks that ``shard`` adds to the optimizer of a sharded model."""

    _gradients: "Gradients"
    _file: FileState | None
    _clipped = ""
    """Arguments of the last ``clip_grad_norm_``, which ranks compare in ``step``."""

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradients; return their norm before clipping. Collective.

        The norm includes all parameters of the optimizer, also parameters that are divided along
        other axes.
        """
        self._clipped = f"max_norm {float(max_norm)}, norm_type {float(norm_type)}"
        held = (parameter for group in self.param_groups for parameter in group["params"])
        return clip_grad_norm_(held, max_norm, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer communication to the next backward outside the block, for gradient accumulation.

        In stage 1, gradients stay unsharded inside the block, and the next backward outside the
        block averages the gradients. In stages 1 and 2, parameters stay unsharded until this
        backward. Gradients accumulate with or without the block.
        """
        gradients = self._gradients
        gradients.sync(is_last=False)
        try:
            yield
        finally:
            gradients.sync(is_last=True)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Clear the gradients; see ``torch.optim.Optimizer.zero_grad``."""
        self._clipped = ""
        self._gradients.forget()
        super().zero_grad(set_to_none)


class Gradients:
    """Records which parameters have received a gradient on any rank since the last step.

    The constructor is collective. It adds a hook to each unsharded parameter; the hook records
    that this rank has computed a gradient. For a parameter without a gradient, torch averages
    zeros, because other ranks may have used the parameter.
    """

    def __init__(self, model: nn.Module, stage: int) -> None:
        self.model, self.stage = cast("Any", model), stage
        self._used: set[str] = set()
        self._sharded = dict(model.named_parameters())
        self._whole: dict[str, Tensor] = {}
        average_unused_parameters(model)
        places = places_of(model)
        for unit in self._units():
            unit.unshard()
            for name, parameter in self._sharded.items():
                whole = getattr(*places[parameter][0])
                if whole is not parameter:
                    self._watch(name, whole)
            unit.reshard()

    def sync(self, *, is_last: bool) -> None:
        """Set whether the next backward is the last before a step and must average gradients."""
        self.model.set_requires_gradient_sync(is_last or self.stage > 1)
        self.model.set_reshard_after_backward(is_last or self.stage > 2)

    def _units(self) -> Iterator[FSDPModule]:
        return (unit for unit in self.model.modules() if isinstance(unit, FSDPModule))

    def _watch(self, name: str, whole: Tensor) -> None:
        trains, self._whole[name] = whole.requires_grad, whole
        # A hook requires requires_grad, and a frozen parameter may be trained later.
        whole.requires_grad = True
        whole.register_post_accumulate_grad_hook(partial(self._has_gradient_now, name))
        whole.requires_grad = trains

    def _has_gradient_now(self, name: str, _: Tensor) -> None:
        self._used.add(name)

    def forget(self) -> None:
        """Drop all gradients, including gradients of gathered parameters."""
        self._used.clear()
        for whole in self._whole.values():
            whole.grad = None

    @torch.no_grad()
    def settle(self, optimizer: Optimizer) -> None:
        """Compare the ranks before a step; drop gradients that no rank has computed. Collective.

        Raises:
            ConfigError: gradients were not averaged; on every rank.
            MismatchError: the ranks perform different operations, see ``Guard``; on every rank.
        """
        for unit in self._units():
            # Parameters that an evaluation has gathered would be outdated after the step.
            unit.reshard()
        mine = [self._has_gradient(name, p) for name, p in self._sharded.items()]
        holds_back = any(whole.grad is not None for whole in self._whole.values())  # in stage 1
        flags = [holds_back, bool(self._used), *mine]
        is_held_back, has_any, *found = guard_of(self.model).before_step(optimizer, flags)
        if is_held_back:
            raise ConfigError(
                "a step of stage 1 must follow a backward outside of no_sync(), which averages "
                "gradients, but all backwards since the last step were inside no_sync(); call the "
                "last backward before step() outside of no_sync()"
            )
        for parameter, is_known in zip(self._sharded.values(), found, strict=True):
            if has_any and not is_known:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.is_average = True  # type: ignore[attr-defined]
        self._used.clear()

    def _has_gradient(self, name: str, parameter: Tensor) -> bool:
        """Return whether backward or the program has set the gradient on this rank.

        The zeros that torch sets for an unused parameter do not count.
        """
        gradient = parameter.grad
        if name in self._used or gradient is None:
            return gradient is not None
        return hasattr(gradient, "is_average") or bool(local(gradient).any())


def before_step(
    stepping: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure, if any, then ``Gradients.settle``; called before ``step()``.

    The closure computes the gradients, which ``settle`` compares.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    with torch.enable_grad():
        loss = closure() if closure else None
    parts = vars(stepping)
    parts["_gradients"].settle(stepping)
    if parts["_file"]:
        parts["_file"].step()
    return args[:1], {"closure": lambda: loss} if closure else {}


def after_step(stepped: Any, *_: object) -> None:
    """Restore offloaded parameters; called after ``step()``."""
    if file := vars(stepped)["_file"]:
        file.end_step()


def upgraded(optimizer: Any, gradients: Gradients, file: FileState | None) -> ShardedOptimizer:
    """Add the methods of ``ShardedOptimizer`` and the hooks to ``optimizer``, in place."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (ShardedOptimizer, kind), {})
    vars(optimizer).update(_gradients=gradients, _file=file)
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    return cast("ShardedOptimizer", optimizer)
