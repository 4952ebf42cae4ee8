"""Carry a state over to a model whose tensors have other names, or more rows.

Names are those of the model's state: ``encoder.embedding.weight``. The optimizer's state follows
its parameter: what is as large as the parameter gets the same rows, and its number is that of the
parameter in the new model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.core.errors import CheckpointError

Fill = float | Callable[[Tensor], Tensor]
"""What added rows hold: one number, or a function from the old tensor to one row or to all."""


@dataclass(frozen=True, slots=True)
class Pad:
    """More rows for a tensor, for instance for a larger vocabulary."""

    size: int
    """Of the first dimension afterwards."""
    fill: Fill = 0.0
    """What the new rows of the model's tensor hold; the optimizer's hold 0, as if never moved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remap:
    """What is to change: first exact names, then patterns, then rows, in the new names."""

    renames: Mapping[str, str] = field(default_factory=dict)
    """Old name and new name."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """Regular expression and replacement as ``re.sub`` takes them; a pattern fits a whole name.
    The first that fits is taken, and only for a name that is not in ``renames``."""
    pads: Mapping[str, Pad] = field(default_factory=dict)
    """New name and its rows."""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(
                    f"Remap.patterns holds regular expressions, got {pattern!r}: {error}"
                ) from None

    def name(self, old: str) -> str:
        """Return the new name of a tensor; the same one where nothing is to change."""
        if old in self.renames:
            return self.renames[old]
        for pattern, replacement in self.patterns.items():
            if match := re.fullmatch(pattern, old):
                try:
                    return match.expand(replacement)
                except (re.error, IndexError) as error:
                    raise CheckpointError(
                        f"Remap.patterns: {replacement!r} cannot replace {pattern!r}: {error}"
                    ) from None
        return old


def remap(tensors: Mapping[str, Tensor], plan: Remap) -> dict[str, Tensor]:
    """Return the tensors of a model under their new names and with their new rows.

    Args:
        tensors: name and tensor; none is changed, and those that stay are not copied.
        plan: what is to change.

    Raises:
        CheckpointError: a name of the plan is not there, two tensors get one name, or a tensor
            has more rows than it shall have; lists every one.
    """
    faults = [f"{name}: to be renamed, not there" for name in plan.renames if name not in tensors]
    new: dict[str, Tensor] = {}
    before: dict[str, str] = {}
    for old, tensor in tensors.items():
        name = plan.name(old)
        if name in new:
            faults.append(f"{name}: both {before[name]} and {old} would get this name")
        new[name], before[name] = tensor, old
    for name, pad in plan.pads.items():
        if name not in new:
            faults.append(f"{name}: to be padded, not there")
        elif fault := _cannot(new[name], pad.size):
            faults.append(f"{name}: {fault}")
    _stop_at(faults)
    for name, pad in plan.pads.items():
        new[name] = _padded(new[name], pad.size, pad.fill)
    return new


def remap_optimizer(
    state: Mapping[str, Any],
    plan: Remap,
    *,
    before: Mapping[str, Sequence[int]],
    after: Sequence[str],
) -> dict[str, Any]:
    """Return the state of an optimizer for the model after ``remap``.

    Args:
        state: ``state_dict()`` of an optimizer of torch, over the parameters of ``before``.
        plan: what is to change.
        before: old name and shape of each parameter, in the order in which the optimizer got
            them: ``{name: p.shape for name, p in old_model.named_parameters()}``.
        after: new names, in the order in which the new optimizer gets them.

    Returns:
        The state: each parameter keeps its group and gets the number that ``after`` gives it;
        one that ``before`` lacks has no state and joins the last group.

    Raises:
        CheckpointError: ``before`` does not fit the state, or a parameter has no place in
            ``after``; lists every one.
    """
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(before):
        raise CheckpointError(
            f"the optimizer's state is of {len(numbers)} parameters, {len(before)} names are "
            f"given; give the names of the model that was saved, in its order"
        )
    place = {name: number for number, name in enumerate(after)}
    moved = {
        number: (plan.name(name), tuple(shape))
        for number, (name, shape) in zip(numbers, before.items(), strict=True)
    }
    _stop_at(
        [
            f"{name}: not among the new parameters"
            for name, _ in moved.values()
            if name not in place
        ]
    )
    new_state = {
        place[moved[number][0]]: _follow(values, moved[number][1], plan.pads.get(moved[number][0]))
        for number, values in state["state"].items()
    }
    new_groups = [
        group | {"params": [place[moved[number][0]] for number in group["params"]]}
        for group in groups
    ]
    taken = {number for group in new_groups for number in group["params"]}
    new_groups[-1]["params"] += [number for number in range(len(after)) if number not in taken]
    return dict(state) | {
        "state": dict(sorted(new_state.items())),
        "param_groups": [_in_order(group, after) for group in new_groups],
    }


def remap_state(
    state: Mapping[str, Any], plan: Remap, *, before: Sequence[str], after: Sequence[str]
) -> dict[str, Any]:
    """Return the state of a run, as its checkpoints hold it, for another model.

    Args:
        state: its ``model`` and ``optimizer`` change, all else stays.
        plan: what is to change.
        before: old names of the parameters, in the order in which the optimizer got them.
        after: new names, in the order in which the new optimizer gets them.

    Raises:
        CheckpointError: as ``remap`` and ``remap_optimizer``, or a name of ``before`` is not
            there.
    """
    model: Mapping[str, Tensor] = state["model"]
    _stop_at([f"{name}: a parameter, not in the state" for name in before if name not in model])
    shapes = {name: tuple(model[name].shape) for name in before}
    return dict(state) | {
        "model": remap(model, plan),
        "optimizer": remap_optimizer(state["optimizer"], plan, before=shapes, after=after),
    }


def _in_order(group: dict[str, Any], after: Sequence[str]) -> dict[str, Any]:
    numbers = sorted(group["params"])
    names = {"param_names": [after[n] for n in numbers]} if "param_names" in group else {}
    return group | {"params": numbers} | names


def _follow(values: Mapping[str, Any], shape: tuple[int, ...], pad: Pad | None) -> dict[str, Any]:
    """Pad what is as large as the parameter was; counters and factors of other shapes stay."""
    if pad is None:
        return dict(values)
    return {
        key: _padded(value, pad.size, 0.0)
        if isinstance(value, Tensor) and shape and tuple(value.shape) == shape
        else value
        for key, value in values.items()
    }


def _cannot(tensor: Tensor, size: int) -> str:
    if not tensor.ndim:
        return "a single number has no rows to add to"
    if tensor.shape[0] > size:
        return f"has {tensor.shape[0]} rows, {size} are wanted; rows are added, never dropped"
    return ""


def _padded(tensor: Tensor, size: int, fill: Fill) -> Tensor:
    old = tensor.shape[0]
    new = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)
    new[:old] = tensor
    new[old:] = fill(tensor) if callable(fill) else fill
    return new


def _stop_at(faults: Sequence[str]) -> None:
    if faults:
        raise CheckpointError(
            f"the state cannot be carried over, {len(faults)} "
            f"name{'s' * (len(faults) != 1)} to correct:\n  " + "\n  ".join(faults)
        )
