"""Compression of gradients to 8 bits, in blocks with a common smallest value and level spacing."""

from enum import IntEnum

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.compress.quantized import Format, Quantized, is_finite
from hpctrain.compress.rail_codec import CodedShare
from hpctrain.core.checks import Number, checked

_CHUNK = 1 << 18  # values per pass, which fit into the CPU cache
_HEAD = 8  # bytes per block for its step and its smallest value
_LEAST_STEP = 1e-7
_FACTORS = 2.0**64, 2.0**120
"""Factors for blocks whose step is below ``_LEAST_STEP``: the second if the first is too small."""
_QUARTER = 0.25
"""Factor for values whose range exceeds the range of float32."""


class _Kind(IntEnum):
    """Kind of a packet, stored in its last byte."""

    PLAIN = 0
    NOT_FINITE = 1
    QUARTERED = 2
    """The blocks contain a quarter of each value."""


class Int8Blocks(Format):
    """Format with one byte per value and eight bytes per block.

    A value is rounded to the nearest of 256 levels between the smallest and the largest value of
    its block. If any value is not finite, all values of the packet become NaN. If the step between
    two levels is below 1e-45, all values of the block become its smallest value.

    Args:
        unit: values per block.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit

    @override
    def num_bytes(self, share: CodedShare, piece: slice) -> int:
        """Return the size: one byte per value, eight per block, and one more; see ``Format``."""
        numel: int = piece.stop - piece.start
        return 1 + numel + _HEAD * -(-numel // self.unit)

    def pack(self, share: CodedShare, piece: slice, values: Tensor) -> Tensor:
        """Encode values as blocks, followed by a byte of ``_Kind``; see ``Format``."""
        packet = torch.empty(self.num_bytes(share, piece), dtype=torch.uint8)
        kind = _Kind.PLAIN
        for chunk, packed in self._chunks(values, packet):
            part = chunk.float()
            coded = _packed(part)
            packed.copy_(coded)
            if not is_finite(part):
                kind = _Kind.NOT_FINITE
            elif not kind and not _heads_of(coded)[:, 0].isfinite().all():
                kind = _Kind.QUARTERED
        if kind is _Kind.QUARTERED:
            for chunk, packed in self._chunks(values, packet):
                packed.copy_(_packed(chunk.float() * _QUARTER))
        packet[-1] = kind
        return packet

    @override
    def unpack(self, share: CodedShare, piece: slice, packet: Tensor, out: Tensor) -> None:
        """Decode rounded values, or NaN; see ``Format``."""
        kind = _Kind(int(packet[-1]))
        if kind is _Kind.NOT_FINITE:
            out.fill_(torch.nan)
            return
        for chunk, packed in self._chunks(out, packet):
            chunk.copy_(torch.ops.quantized.embedding_bag_byte_unpack(packed))
        if kind is _Kind.QUARTERED:
            largest = torch.finfo(torch.float32).max * _QUARTER
            out.clamp_(-largest, largest).div_(_QUARTER)

    def _chunks(self, values: Tensor, packet: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs: a piece of ``values``, one block per row, and its bytes in ``packet``."""
        unit, whole = self.unit, values.numel() // self.unit * self.unit
        rows, step = values[:whole].view(-1, unit), max(_CHUNK // unit, 1)
        packed = packet[: len(rows) * (unit + _HEAD)].view(-1, unit + _HEAD)
        pieces = list(zip(rows.split(step), packed.split(step), strict=True)) if whole else []
        if whole < values.numel():
            rest = packet[packed.numel() : -1]
            pieces.append((values[whole:].view(1, -1), rest.view(1, -1)))
        return pieces


def _packed(blocks: Tensor) -> Tensor:
    """Encode each row; rows of small range are scaled, since torch adds 1e-8 to ranges."""
    packed: Tensor = torch.ops.quantized.embedding_bag_byte_prepack(blocks)
    step, least = _heads_of(packed)[:, 0].clone(), _LEAST_STEP
    for factor in _FACTORS:
        if step.min() >= least:
            break
        small = ((step > 0) & (step < least)).nonzero().squeeze(1)
        least = _LEAST_STEP / factor
        again = torch.ops.quantized.embedding_bag_byte_prepack(blocks[small] * factor)
        again[:, -_HEAD:] = (_heads_of(again) / factor).view(torch.uint8)
        packed[small] = again
    return packed


def _heads_of(packed: Tensor) -> Tensor:
    """Return the step and the smallest value of each encoded row; read-only."""
    if packed.shape[1] % 4 == 0:
        return packed.view(torch.float32)[:, -2:]
    heads = packed[:, -_HEAD:].clone(memory_format=torch.contiguous_format)
    return heads.view(torch.float32)


class Int8(Quantized):
    """Codec that sends one byte per value, about a quarter of float32.

    Args:
        block: values that share a step and a smallest value.
        error_feedback: whether rounding errors are added in the next step. Error feedback needs
            twice the memory of the gradients in a rank's slice, and is rarely necessary.
    """

    def __init__(self, block: int = 512, *, error_feedback: bool = False) -> None:
        checked("block", block, Number)
        checked("error_feedback", error_feedback, bool)
        super().__init__(Int8Blocks(block), feedback=error_feedback)
