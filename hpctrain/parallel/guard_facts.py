"""Facts that the ranks of a divided model compare: as numbers, for all-reduce, and as text."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from hpctrain.core.checksum import crc32
from hpctrain.core.torch_compat import foreach_norm, version_of
from hpctrain.gradients.weight_sample import WeightSample

Named = Sequence[tuple[str, nn.Parameter]]

NOTHING = -(1 << 62)  # number that a rank sends if it has no value to compare
STATES = (
    "no gradient",
    "set by the program",
    "unchanged since backward",
    "changed after backward",
)
_NONE, _SET, _LEFT, _CHANGED = range(4)


def pairs(values: Sequence[int | None]) -> list[int]:
    """Return ``v, -v`` for each value ``v``; see ``differ`` for the maxima over ranks."""
    return [n for v in values for n in ((NOTHING, NOTHING) if v is None else (v, -v))]


def differ(words: Sequence[int]) -> bool:
    """Return whether a value ``v`` differs between ranks, given the maxima of ``v`` and ``-v``."""
    most, least = words
    return most not in (NOTHING, -least)


def crc(what: object) -> int:
    """Return the CRC-32 of ``repr(what)``."""
    return crc32(repr(what).encode())


def part(tensor: Tensor) -> Tensor:
    """Return the local tensor object of a ``DTensor``, not a view; return others unchanged."""
    here: Tensor = getattr(tensor, "_local_tensor", tensor)
    return here


def is_divided(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor that is not replicated on all axes of its mesh."""
    return isinstance(tensor, DTensor) and not all(
        isinstance(one, Replicate) for one in tensor.placements
    )


def settings_of(optimizer: Optimizer) -> dict[str, str]:
    """Return the options of all parameter groups and of the last clipping: text by name."""
    found = {"optimizer": type(optimizer).__name__, "clipping": getattr(optimizer, "_clipped", "")}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{k} of group {number}": repr(v) for k, v in group.items() if k != "params"}
    return found


def mark(parameters: Sequence[nn.Parameter]) -> None:
    """Record the version and the largest absolute element of each gradient, after backward."""
    held = [p.grad for p in parameters if p.grad is not None]
    sizes = _sizes(held)
    for gradient in held:
        left = _version(gradient), sizes.get(gradient)
        gradient.left_by_backward = left  # type: ignore[attr-defined]


def states_of(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the state of each gradient, as an index of ``STATES``."""
    left: dict[Tensor, Any] = {}
    found = [_NONE] * len(parameters)
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None:
            version, size = getattr(gradient, "left_by_backward", (None, None))
            is_same = version == _version(gradient)
            found[number] = _SET if version is None else _LEFT if is_same else _CHANGED
            if is_same and size is not None:
                left[gradient] = size
    if left:
        now = _sizes(list(left))
        before, after = (torch.stack([s[g].cpu() for g in left]) for s in (left, now))
        # Compare the bits, because NaN is not equal to NaN.
        same = (before.view(torch.int64) == after.view(torch.int64)).tolist()
        changed = {id(g) for g, is_same in zip(left, same, strict=True) if not is_same}
        for number, parameter in enumerate(parameters):
            if id(parameter.grad) in changed:
                found[number] = _CHANGED
    return found


def bounds_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a matrix with 4 rows; ``is_clamp`` gets its elementwise maxima over all ranks.

    Each column describes the gradient of one parameter. If the gradient has changed but its
    version counter has not, row 0 has the negative of its largest absolute element. If the
    gradient is unchanged, row 1 has its largest absolute element. Otherwise, rows 2 and 3 have
    its index in ``STATES`` and the negative of this index. All other elements are -inf.
    """
    states = states_of(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    now = _sizes(gradients)
    rows = torch.full((4, len(parameters)), -torch.inf, dtype=torch.float64)
    for number, (p, state) in enumerate(zip(parameters, states, strict=True)):
        version, size = getattr(p.grad, "left_by_backward", (None, None))
        if p.grad is not None and size is not None and version == _version(p.grad):
            is_changed = state == _CHANGED
            rows[int(not is_changed), number] = now[p.grad].cpu() * (-1 if is_changed else 1)
        else:
            rows[2:, number] = torch.tensor([state, -state])
    return rows


def is_clamp(bounds: Tensor) -> bool:
    """Return whether ``clip_grad_value_`` on all ranks can have caused the changed gradients.

    After ``clip_grad_value_``, no element of an unchanged part of a gradient exceeds the largest
    element of a part that changed on another rank.

    Args:
        bounds: maxima over all ranks of the rows of ``bounds_of``.
    """
    least_changed, most_unchanged = -bounds[0], bounds[1]
    is_counted = bounds[2] > -torch.inf
    is_bounded = ~is_counted & (most_unchanged <= least_changed)
    by_count = is_counted & (bounds[:2] == -torch.inf).all(0) & (bounds[2] == -bounds[3])
    return bool((is_bounded | by_count).all())


def _version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor.

    For a divided ``DTensor``, writes to its local tensor are not counted.
    """
    own = 0 if is_divided(tensor) or tensor is part(tensor) else version_of(part(tensor))
    return version_of(tensor) + own


def _sizes(gradients: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the largest absolute element of each ``DTensor`` that has elements on every rank.

    The result is for gradients whose version counter is not sufficient: the counter of a
    ``DTensor`` does not count writes by ``torch._foreach_...``, such as clipping.
    """
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor) and all(_has_all(gradient)):
            kinds[gradient.dtype, part(gradient).device].append(gradient)
    found: dict[Tensor, Tensor] = {}
    for some in kinds.values():
        sizes = foreach_norm([part(one) for one in some], torch.inf)
        found.update(zip(some, (size.double() for size in sizes), strict=True))
    return found


def _has_all(tensor: DTensor) -> Iterator[bool]:
    """Yield, for each dimension, whether no rank has an empty range of this dimension."""
    parts = [1] * tensor.ndim
    for one, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if not isinstance(one, Replicate):
            parts[one.dim] *= size  # type: ignore[attr-defined]
    for length, count in zip(tensor.shape, parts, strict=True):
        yield length > 0 and -(-length // count) * (count - 1) < length


def writes_of(named: Named) -> list[int]:
    """Return the number of DTensor operations that wrote to each divided parameter."""
    return [version_of(p) for _, p in named if is_divided(p)]


def shared_texts(parameter: nn.Parameter, step: int) -> dict[str, str]:
    """Return, as text by name, the facts about a shared weight that the stages compare."""
    return {
        "requires_grad": str(parameter.requires_grad),
        "the gradient": STATES[states_of([parameter])[0]],
        "the values": f"{WeightSample([('', part(parameter))]).checksum(step):08x}",  # type: ignore[list-item]
    }


def texts(fact: str, named: Named, optimizer: Optimizer | None) -> Mapping[str, str]:
    """Return, as text by name, this rank's values that the rule ``fact`` compares."""
    if fact in ("settings", "stages"):
        return settings_of(optimizer) if optimizer else {}
    if fact == "trained":
        return {f"requires_grad of {name}": str(p.requires_grad) for name, p in named}
    if fact == "writes":
        return {n: f"{version_of(p)} writes" for n, p in named if is_divided(p)}
    if fact == "pattern":
        states = states_of([p for _, p in named if p.requires_grad])
        return {"the gradients": STATES[states[0]]}
    states = states_of([p for _, p in named])
    return {f"the gradient of {n}": STATES[s] for (n, _), s in zip(named, states, strict=True)}
