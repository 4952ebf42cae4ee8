"""What of a tensor Horovod is given, and which of its operations gives our result."""

from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.arguments import flat_of
from hpctrain.comm.ops import Combination, Op

MOST_LANES = (1 << 31) - 1
"""Elements of all ranks together in one operation: Horovod's offsets have 32 bits."""

_WIRE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.int64: torch.int64}
_WIRE |= dict.fromkeys(
    (torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8), torch.int32
)
"""Small integers are summed in 32 bits, whose low ones are their sum that wraps around: Horovod's
torch has no operations for some of them, and the MPI library below it saturates others."""
_LOGICAL = {torch.bitwise_or: "Max", torch.bitwise_and: "Min"}
_ORDER = {torch.minimum: "Min", torch.maximum: "Max"}
_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Lanes(NamedTuple):
    """The bytes of a tensor as numbers that Horovod moves, whatever they mean."""

    values: Tensor
    lanes: int
    """Numbers for each element of the tensor."""


def as_lanes(tensor: Tensor) -> Lanes:
    """Return the elements of a tensor of any dtype and layout; the same memory if possible."""
    lane = _LANES[tensor.itemsize]
    return Lanes(flat_of(tensor).view(lane), tensor.itemsize // lane.itemsize)


def operation(how: Combination) -> str | None:
    """Return the name of Horovod's operation with the same result for values in ``how.wide``.

    Returns:
        None where there is none: MPI's minimum of NaN is no NaN, and of unsigned numbers Horovod
        knows nothing.
    """
    if how.wide is torch.bool:
        return _LOGICAL.get(how.function)
    if how.wide not in _WIRE:
        return None
    if how.op is Op.SUM:
        return "Sum"
    if how.op is Op.PRODUCT:
        return "Product"
    return None if how.wide.is_floating_point else _ORDER.get(how.function)


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype values of ``dtype`` travel."""
    return _WIRE[dtype]
