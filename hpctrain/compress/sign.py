"""Gradients of one bit: the majority of signs; or a bit, and two values for each row."""

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.compress.quantized import Quantized
from hpctrain.compress.rail_codec import Share


class Signs:
    """The format of one bit per value, which says +1 or -1; zero is +1.

    Values of which one is not finite are NaN.
    """

    unit = 8

    def num_bytes(self, share: Share, piece: slice) -> int:  # noqa: ARG002 - every piece alike
        """Return a bit per value, and a byte."""
        numel: int = piece.stop - piece.start
        return 1 + -(-numel // 8)

    def pack(self, share: Share, piece: slice, values: Tensor) -> Tensor:
        """Return whether something is not finite, then the bits."""
        packet = torch.empty(self.num_bytes(share, piece), dtype=torch.uint8)
        packet[0] = not bool(values.sum().isfinite())
        packet[1:] = _bits_of(values >= 0)
        return packet

    def unpack(self, share: Share, piece: slice, packet: Tensor, out: Tensor) -> None:  # noqa: ARG002
        """Write 1 and -1, or NaN."""
        if packet[0]:
            out.fill_(torch.nan)
        else:
            _look_up(packet[1:], _SIGNS, out)


class SignSGD(Quantized):
    """Lets nodes vote on the sign of each value; what comes of it is +1 or -1, whatever the scale.

    A tie counts as +1. Takes an optimizer that adds no scale of its own, such as plain SGD with a
    small rate: Adam divides by the magnitude, which is 1.

    Source: Bernstein et al. 2018, "signSGD with majority vote is communication efficient and
    fault tolerant". It converges only under conditions; ``OneBit`` keeps its errors, and does.
    """

    def __init__(self) -> None:
        super().__init__(Signs(), feedback=False)

    def warning(self, optimizer: Optimizer) -> str:
        """Say that a second moment of signs is 1; see ``Codec``."""
        if not any("betas" in group for group in optimizer.param_groups):
            return ""
        return (
            f"{type(optimizer).__name__} divides by the magnitude of gradients, and signs have "
            f"none: every weight moves by the whole rate in every step; take SGD, or OneBit"
        )


class TwoValues:
    """The format of one bit per value, and two values for each row of a tensor.

    A row has all weights into one output. A bit says whether a value is at least zero; it stands
    for the mean of those of its row that are, or that are not.
    """

    unit = 8

    def num_bytes(self, share: Share, piece: slice) -> int:
        """Return a bit per value, and eight bytes per row."""
        numel: int = piece.stop - piece.start
        return 8 * len(_row_starts(share, piece)) + -(-numel // 8)

    def pack(self, share: Share, piece: slice, values: Tensor) -> Tensor:
        """Return both means of each row, then the bits."""
        starts = _row_starts(share, piece)
        packet = torch.empty(self.num_bytes(share, piece), dtype=torch.uint8)
        if not len(starts):
            return packet
        is_high = values >= 0
        high = np.add.reduceat(is_high.numpy(), starts, dtype=np.int64)
        low = np.diff(starts, append=values.numel()) - high
        zero = values.new_zeros(())
        for row, (rows, numels) in enumerate(((~is_high, low), (is_high, high))):
            totals = np.add.reduceat(torch.where(rows, values, zero).numpy(), starts)
            means = totals / np.maximum(numels, 1)
            packet[4 * row * len(starts) : 4 * (row + 1) * len(starts)].view(torch.float32).copy_(
                torch.from_numpy(means)
            )
        packet[8 * len(starts) :] = _bits_of(is_high)
        return packet

    def unpack(self, share: Share, piece: slice, packet: Tensor, out: Tensor) -> None:
        """Write the mean that each bit stands for."""
        starts = _row_starts(share, piece)
        if not len(starts):
            return
        numels = torch.from_numpy(np.diff(starts, append=out.numel()))
        means = packet[: 8 * len(starts)].view(torch.float32).view(2, -1).to(out.dtype)
        low, high = (each.repeat_interleave(numels) for each in means)
        bits = np.unpackbits(packet[8 * len(starts) :].numpy(), count=out.numel())
        torch.where(torch.from_numpy(bits).bool(), high, low, out=out)


class OneBit(Quantized):
    """Sends a bit for each value and two values for each row, and keeps both ends' errors.

    Args:
        warmup_steps: so many first steps are exact: at the start of a training gradients change
            faster than errors are made good.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs".
    """

    def __init__(self, warmup_steps: int = 0) -> None:
        super().__init__(TwoValues(), feedback=True, warmup_steps=warmup_steps)


def _row_starts(share: Share, piece: slice) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return where rows, or what is left of them, begin in a piece."""
    starts = [
        np.append(at.first, np.arange(at.first + at.row - at.offset % at.row, at.end, at.row))
        for at in share.places
    ]
    edges = np.concatenate(starts) if starts else np.empty(0, np.int64)
    inside = edges[(edges > piece.start) & (edges < piece.stop)] - piece.start
    return np.append(0, inside) if piece.start < piece.stop else inside[:0]


def _bits_of(flags: Tensor) -> Tensor:
    """Return one bit per flag, the first one highest."""
    return torch.from_numpy(np.packbits(flags.numpy()))


_SIGNS = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * 2.0 - 1)


def _look_up(bits: Tensor, table: Tensor, out: Tensor) -> None:
    """Write the eight values that each byte stands for."""
    table, whole = table.to(out.dtype), out.numel() // 8
    torch.index_select(table, 0, bits[:whole].int(), out=out[: whole * 8].view(-1, 8))
    if out.numel() % 8:
        out[whole * 8 :] = table[int(bits[whole])][: out.numel() % 8]
