"""Gradients of 8 bits: blocks of values, each with a scale and a smallest value."""

import torch
from torch import Tensor

from hpctrain.compress.codec import require_count, require_flag
from hpctrain.compress.quantized import Quantized
from hpctrain.compress.rail_codec import CodedShare

_CHUNK = 1 << 18  # values that are worked on while they lie in the cache
_HEAD = 8  # bytes of a block beside those of its values: its step and its smallest
_LEAST_STEP, _LARGER = 1e-7, 2.0**64


class Int8Blocks:
    """The format of one byte per value, and eight per block.

    A value is rounded to the nearest of 256 between the smallest and the largest of its block.
    Values of which one is not finite are NaN.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def num_bytes(self, share: CodedShare, piece: slice) -> int:  # noqa: ARG002 - every piece alike
        """Return a byte per value, eight per block, and one."""
        numel: int = piece.stop - piece.start
        return 1 + numel + _HEAD * -(-numel // self.unit)

    def pack(self, share: CodedShare, piece: slice, values: Tensor) -> Tensor:
        """Return whether something is not finite behind all blocks."""
        packet = torch.empty(self.num_bytes(share, piece), dtype=torch.uint8)
        zeros, is_finite = torch.zeros(min(values.numel(), max(_CHUNK, self.unit))), True
        for chunk, packed in self._chunks(values, packet):
            part = chunk.float()
            packed.copy_(_packed(part))
            # 0 times what is not finite is NaN; a sum takes thrice as long, and may overflow.
            is_finite &= not torch.dot(part.view(-1), zeros[: part.numel()])
        packet[-1] = not is_finite
        return packet

    def unpack(self, share: CodedShare, piece: slice, packet: Tensor, out: Tensor) -> None:  # noqa: ARG002
        """Write the rounded values, or NaN."""
        if packet[-1]:
            out.fill_(torch.nan)
            return
        for chunk, packed in self._chunks(out, packet):
            chunk.copy_(torch.ops.quantized.embedding_bag_byte_unpack(packed))

    def _chunks(self, values: Tensor, packet: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pieces of values in rows of a block, and the bytes of each row."""
        unit, whole = self.unit, values.numel() // self.unit * self.unit
        rows, step = values[:whole].view(-1, unit), max(_CHUNK // unit, 1)
        packed = packet[: len(rows) * (unit + _HEAD)].view(-1, unit + _HEAD)
        pieces = list(zip(rows.split(step), packed.split(step), strict=True)) if whole else []
        if whole < values.numel():
            rest = packet[packed.numel() : -1]
            pieces.append((values[whole:].view(1, -1), rest.view(1, -1)))
        return pieces


def _packed(blocks: Tensor) -> Tensor:
    """Return the bytes of rows. Torch adds 1e-8 to a range, so what is as small is made larger."""
    packed: Tensor = torch.ops.quantized.embedding_bag_byte_prepack(blocks)
    step = _heads_of(packed)[:, 0]
    if step.min() < _LEAST_STEP:
        small = ((step > 0) & (step < _LEAST_STEP)).nonzero().squeeze(1)
        again = torch.ops.quantized.embedding_bag_byte_prepack(blocks[small] * _LARGER)
        again[:, -_HEAD:] = (_heads_of(again) / _LARGER).view(torch.uint8)
        packed[small] = again
    return packed


def _heads_of(packed: Tensor) -> Tensor:
    """Return the step and the smallest value of each row, to be read."""
    if packed.shape[1] % 4 == 0:
        return packed.view(torch.float32)[:, -2:]
    heads = packed[:, -_HEAD:].clone(memory_format=torch.contiguous_format)
    return heads.view(torch.float32)


class Int8(Quantized):
    """Sends a byte for each value: about a quarter of float32.

    Args:
        block: values that are rounded together.
        error_feedback: whether what rounding leaves out is added in the next step. Costs as much
            memory as the gradients of a rank's slice, twice; rarely needed at 8 bits.
    """

    def __init__(self, block: int = 512, *, error_feedback: bool = False) -> None:
        require_count("block", block, 1)
        require_flag("error_feedback", error_feedback)
        super().__init__(Int8Blocks(block), feedback=error_feedback)
