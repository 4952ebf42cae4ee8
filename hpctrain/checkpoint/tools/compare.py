"""Comparison of two states, bit by bit: checkpoints, runs, or states that were exported."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpctrain.checkpoint.format.state_tree import component, flatten
from hpctrain.checkpoint.loading import load
from hpctrain.checkpoint.tools.convert import read_foreign
from hpctrain.checkpoint.tools.describe import checkpoints_in
from hpctrain.checkpoint.tools.export import DCP_INDEX, part_of
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError

T = TypeVar("T")

PRIVATE = "private"
"""Begins the paths of what a rank has of its own: ``private/3/random``."""

_PIECE = 1 << 20
"""Elements that are compared at once: memory stays small next to a large tensor."""

_LONGEST = 60
"""Characters shown of a plain value."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Difference:
    """One place at which two states are not the same."""

    path: str
    """Of the tensor or plain value, such as ``model/0.weight``."""
    what: str
    """``values``, ``shape``, ``dtype``, ``missing`` or ``plain``."""
    text: str
    """For people, in one line."""
    num_different: int = 0
    """Elements whose bits differ; 0 unless ``what`` is ``values``."""
    max_abs: float = 0.0
    """Largest difference of two finite elements."""
    max_ulp: int | None = None
    """Most numbers of this type that lie between two finite elements; None for whole numbers."""
    num_not_finite: int = 0
    """Different elements of which at least one is infinite or no number."""
    first: tuple[int, ...] = ()
    """Index of the first element that differs."""


def newest_state(path: Path | str, only: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint at a path, the newest one of a run directory, and its state.

    Args:
        path: of a checkpoint or a run directory.
        only: of this part of the state, by its path.

    Raises:
        CheckpointError: there is none, it is damaged, or it has no such part.
    """
    source = checkpoints_in(path)[-1]
    return source, _part(load(source, SerialCommunicator()).state, only, source)


def compare(a: Path | str, b: Path | str, only: Sequence[str] = ()) -> list[Difference]:
    """Return how two states differ: tensors first, then plain values, then what ranks have.

    Reads both into memory. What is private to ranks counts where both are checkpoints and
    ``only`` is not given.

    Args:
        a: a checkpoint, a run directory for its newest one, or what ``export`` writes.
        b: the same.
        only: these parts of the state, by their paths; an exported state that has no such part
            stands for the part.

    Raises:
        CheckpointError: one of them cannot be read, or a checkpoint has no such part.
    """
    (state_a, private_a), (state_b, private_b) = _read(a), _read(b)
    if only:
        return [
            found
            for part in only
            for found in _compare(
                _chosen(state_a, part, a, is_export=private_a is None),
                _chosen(state_b, part, b, is_export=private_b is None),
                f"{part}/",
            )
        ]
    found = _compare(state_a, state_b, "")
    if private_a is None or private_b is None:
        return found
    for rank in sorted({*private_a, *private_b}):
        path = f"{PRIVATE}/{rank}"
        if rank in private_a and rank in private_b:
            found += _compare(private_a[rank], private_b[rank], f"{path}/")
        else:
            where = ("A", "B") if rank in private_a else ("B", "A")
            text = f"{path}: of a rank of {where[0]}, not of {where[1]}"
            found.append(Difference(path, "missing", text))
    return found


def _read(path: Path | str) -> tuple[dict[str, Any], Mapping[int, Any] | None]:
    """Return a state, and what was private to ranks; None of that for an exported state."""
    path = Path(path)
    if path.is_file() or (path / DCP_INDEX).exists():
        return read_foreign(path), None
    source = checkpoints_in(path)[-1]
    loaded = load(source, SerialCommunicator())
    return _part(loaded.state, None, source), loaded.private


def _chosen(state: dict[str, Any], part: str, path: Path | str, *, is_export: bool) -> Any:
    if is_export and part.partition("/")[0] not in state:
        return state
    return _part(state, part, Path(path))


def _part(state: Any, only: str | None, source: Path) -> dict[str, Any]:
    part = state if only is None else part_of(state, only)
    if not isinstance(part, dict):
        raise CheckpointError(
            f"{only or 'the state'} of {source} is a {type(part).__name__}, a dict is needed; "
            f"name what holds it"
        )
    return part


def _compare(a: object, b: object, prefix: str) -> list[Difference]:
    tensors = [_under(prefix, flatten(state)[0]) for state in (a, b)]
    values = [_under(prefix, plain_values(state)) for state in (a, b)]
    return [*differences(*tensors), *plain_differences(*values)]


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + path: value for path, value in values.items()}


def differences(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[Difference]:
    """Yield how tensors of the same path differ: first in the order of ``a``, then what it lacks.

    Bits are compared: two equal NaN are the same, 0.0 and -0.0 are not.

    Args:
        a: path and tensor, on the CPU.
        b: the same, of the other state.
    """
    return _matched(a, b, _told, _difference)


def plain_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield how plain values of the same path differ; equal numbers of other types differ too."""
    return _matched(a, b, _short, _plain_difference)


def _matched(
    a: Mapping[str, T],
    b: Mapping[str, T],
    told: Callable[[T], str],
    compare: Callable[[str, T, T], Difference | None],
) -> Iterator[Difference]:
    """Compare what has the same path, then tell what only ``b`` has."""
    for path, value in a.items():
        if path not in b:
            yield Difference(path, "missing", f"{path}: {told(value)} in A, not in B")
        elif found := compare(path, value, b[path]):
            yield found
    for path, value in b.items():
        if path not in a:
            yield Difference(path, "missing", f"{path}: {told(value)} in B, not in A")


def plain_values(state: object) -> dict[str, Any]:
    """Return the plain values of a state, without its tensors, by path and in their order."""
    found: dict[str, Any] = {}
    _gather(state, (), found)
    return found


def _gather(value: object, at: tuple[str, ...], found: dict[str, Any]) -> None:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            _gather(item, (*at, component(key)), found)
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value):
            _gather(item, (*at, str(number)), found)
    elif not isinstance(value, Tensor):
        found["/".join(at)] = value


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _plain_difference(path: str, a: object, b: object) -> Difference | None:
    same = type(a) is type(b) and a == b
    if isinstance(a, float) and isinstance(b, float):
        same = a.hex() == b.hex()  # tells 0.0 from -0.0, and holds nan equal to itself
    return None if same else Difference(path, "plain", f"{path}: {_short(a)}, and {_short(b)}")


def _difference(path: str, a: Tensor, b: Tensor) -> Difference | None:
    for what in ("shape", "dtype"):
        if getattr(a, what) != getattr(b, what):
            return Difference(path, what, f"{path}: {_told(a)}, and {_told(b)}")
    found = _Found()
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, flat_a.numel(), _PIECE):
        found.add(flat_a[start : start + _PIECE], flat_b[start : start + _PIECE], start)
    if not found.count:
        return None
    first = tuple(map(int, np.unravel_index(found.first, a.shape)))
    return Difference(
        path=path,
        what="values",
        text=f"{path} {_told(a)}: {found.text(a.numel())}; the first is {list(first)}: "
        f"{_short(a[first].item())}, and {_short(b[first].item())}",
        num_different=found.count,
        max_abs=found.max_abs,
        max_ulp=found.max_ulp,
        num_not_finite=found.not_finite,
        first=first,
    )


class _Found:
    """What the pieces of two tensors have shown."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        self.max_abs = 0.0
        self.max_ulp: int | None = None
        self.not_finite = 0

    def add(self, a: Tensor, b: Tensor, start: int) -> None:
        """Compare two pieces of the same length, which begin at ``start`` of their tensors."""
        unequal = (_bits(a) != _bits(b)).reshape(len(a), -1).any(dim=1)
        if not unequal.any():
            return
        if not self.count:
            self.first = start + int(unequal.int().argmax())
        self.count += int(unequal.sum())
        a, b = _real(a[unequal]), _real(b[unequal])
        if not a.dtype.is_floating_point:
            # Python's numbers: differences of uint64 fit no type of torch.
            pairs = zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True)
            self.max_abs = max(self.max_abs, float(max(abs(int(x) - int(y)) for x, y in pairs)))
            return
        finite = _wide(a).isfinite() & _wide(b).isfinite()
        self.not_finite += int((~finite).reshape(len(finite), -1).any(dim=1).sum())
        a, b = a[finite], b[finite]
        self.max_ulp = self.max_ulp or 0
        if not a.numel():
            return
        self.max_abs = max(self.max_abs, float((_wide(a) - _wide(b)).abs().max()))
        self.max_ulp = max(self.max_ulp, _ulp(a, b))

    def text(self, num: int) -> str:
        """Say it in words; ``num`` is the number of all elements."""
        text = f"{self.count} of {num} elements differ by at most {self.max_abs:.6g}"
        if self.max_ulp is not None:
            text += f" ({self.max_ulp} ulp)"
        if self.not_finite:
            text += f"; {self.not_finite} of them are infinite or no number"
        return text


def _bits(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def _ulp(a: Tensor, b: Tensor) -> int:
    x, y = _order(a), _order(b)
    return int((np.maximum(x, y) - np.minimum(x, y)).max())


def _order(tensor: Tensor) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Map floating-point numbers to whole ones that count them upwards; both zeros are one."""
    size = tensor.element_size()
    bits: npt.NDArray[np.unsignedinteger[Any]]
    bits = tensor.contiguous().view(_BITS[size]).numpy().view(_UNSIGNED[size])
    if not math.isfinite(torch.finfo(tensor.dtype).min) or torch.finfo(tensor.dtype).min >= 0:
        return bits  # a type without a sign
    half = bits.dtype.type(1 << (8 * size - 1))
    return np.where(bits >= half, half - (bits - half), bits + half)
