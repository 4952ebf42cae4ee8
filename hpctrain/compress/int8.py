"""Gradients of 8 bits: blocks of values with a scale each."""

import torch
from torch import Tensor

from hpctrain.compress.quantized import Quantized
from hpctrain.compress.rail_codec import Share

_CHUNK = 1 << 15  # values that are worked on while they lie in the cache


class Int8Blocks:
    """The format of one byte per value, and four per block for its scale.

    A value is rounded to the nearest multiple of its block's largest magnitude over 127: it is off
    by at most 1/254 of that. A block with a value that is not finite is NaN.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def num_bytes(self, share: Share, piece: slice) -> int:  # noqa: ARG002 - every piece alike
        """Return a byte per value, and four per block."""
        numel: int = piece.stop - piece.start
        return numel + 4 * -(-numel // self.unit)

    def pack(self, share: Share, piece: slice, values: Tensor) -> Tensor:
        """Return the scales, then the rounded values."""
        packet = torch.empty(self.num_bytes(share, piece), dtype=torch.uint8)
        scales, rounded = self._parts(packet, values)
        for block, first, chunk in self._chunks(values):
            largest = torch.linalg.vector_norm(chunk, torch.inf, dim=1)
            scale = scales[block : block + len(chunk)].copy_(largest.div_(127))
            inverse = scale.reciprocal().masked_fill_(scale == 0, 0.0).to(chunk.dtype)
            of_chunk = rounded[first : first + chunk.numel()].view(chunk.shape)
            of_chunk.copy_((chunk * inverse[:, None]).round_())
        return packet

    def unpack(self, share: Share, piece: slice, packet: Tensor, out: Tensor) -> None:  # noqa: ARG002
        """Write the rounded values times their scales."""
        scales, rounded = self._parts(packet, out)
        scales = scales.to(out.dtype)
        for block, first, chunk in self._chunks(out):
            of_chunk = rounded[first : first + chunk.numel()].view(chunk.shape)
            torch.mul(of_chunk, scales[block : block + len(chunk), None], out=chunk)

    def _parts(self, packet: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        num_bytes = 4 * -(-values.numel() // self.unit)
        return packet[:num_bytes].view(torch.float32), packet[num_bytes:].view(torch.int8)

    def _chunks(self, values: Tensor) -> list[tuple[int, int, Tensor]]:
        """Return pieces in rows of a block, each with the numbers of its first block and value."""
        unit, whole = self.unit, values.numel() // self.unit * self.unit
        step = max(_CHUNK // unit, 1) * unit
        pieces = [
            (start // unit, start, values[start : min(start + step, whole)].view(-1, unit))
            for start in range(0, whole, step)
        ]
        if whole < values.numel():
            pieces.append((whole // unit, whole, values[whole:].view(1, -1)))
        return pieces


class Int8(Quantized):
    """Sends a byte for each value: about a quarter of float32.

    Args:
        block: values that share a scale; a multiple of 4.
        error_feedback: whether what rounding leaves out is added in the next step. Costs as much
            memory as the gradients of a rank's slice, twice; rarely needed at 8 bits.
    """

    def __init__(self, block: int = 256, *, error_feedback: bool = False) -> None:
        super().__init__(Int8Blocks(block), feedback=error_feedback)
