"""Codecs that send one bit per value: ``SignSGD`` and ``OneBit``."""

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hpctrain.compress.quantized import Format, Quantized, is_finite
from hpctrain.compress.rail_codec import CodedShare


class Signs(Format):
    """Format with one bit per value, for +1 or -1; zero becomes +1.

    If any value is not finite, all values of the packet become NaN.
    """

    unit = 8

    @override
    def num_bytes(self, share: CodedShare, piece: slice) -> int:
        """Return the size in bytes: one bit per value, and one byte; see ``Format``."""
        numel: int = piece.stop - piece.start
        return 1 + -(-numel // 8)

    def pack(self, share: CodedShare, piece: slice, values: Tensor) -> Tensor:
        """Encode a flag byte, 1 if any value is not finite, and the sign bits; see ``Format``."""
        packet = torch.empty(self.num_bytes(share, piece), dtype=torch.uint8)
        packet[0] = not is_finite(values)
        packet[1:] = _bits_of(values)
        return packet

    @override
    def unpack(self, share: CodedShare, piece: slice, packet: Tensor, out: Tensor) -> None:
        """Decode 1 and -1, or NaN; see ``Format``."""
        if packet[0]:
            out.fill_(torch.nan)
        else:
            _signs_to(packet[1:], out)


class SignSGD(Quantized):
    """Codec whose result is the majority sign of each value over the nodes: +1 or -1.

    A tie gives +1. The optimizer must not scale gradients: use plain SGD with a small learning
    rate, since Adam divides by the magnitude of gradients, which is 1. Convergence is not
    guaranteed; ``OneBit`` adds its errors in the next step, and converges.

    Source: Bernstein et al. 2018, "signSGD with majority vote is communication efficient and
    fault tolerant".
    """

    def __init__(self) -> None:
        super().__init__(Signs(), feedback=False)

    def warning(self, optimizer: Optimizer) -> str:
        """Return a warning if the optimizer divides by a second moment; see ``Codec``."""
        if not any("betas" in group for group in optimizer.param_groups):
            return ""
        return (
            "the optimizer should not divide by the magnitude of gradients, which is 1 for "
            f"signs, got {type(optimizer).__name__}, with which each weight changes by the "
            "learning rate in each step; use SGD, or the codec OneBit"
        )


class TwoValues:
    """Format with one bit per value, and two values for each row of a tensor.

    A row has all weights of one output. The bit of a value is 1 if the value is at least zero, and
    is decoded to the mean of all values in its row with the same bit.
    """

    unit = 8

    def num_bytes(self, share: CodedShare, piece: slice) -> int:
        """Return the size in bytes: one bit per value, and eight bytes per row; see ``Format``."""
        numel: int = piece.stop - piece.start
        return 8 * sum(rows for _, rows, _ in _rows_in(share, piece)) + -(-numel // 8)

    def pack(self, share: CodedShare, piece: slice, values: Tensor) -> Tensor:
        """Encode values as two means per row, then bits; see ``Format``."""
        means = []
        for first, rows, numel in _rows_in(share, piece):
            matrix = values[first : first + rows * numel].view(rows, numel)
            high = (matrix >= 0).sum(1)
            counts = high.clamp(min=1), (numel - high).clamp(min=1)
            pair = _parts(matrix, counts)
            if not pair.isfinite().all():  # a sum may overflow although the mean does not
                pair = _parts(matrix.double(), counts)
            means.append(pair.float().view(-1))
        bits = _bits_of(values)
        return torch.cat([*(each.view(torch.uint8) for each in means), bits])

    def unpack(self, share: CodedShare, piece: slice, packet: Tensor, out: Tensor) -> None:
        """Decode each bit to the mean that the bit selects; see ``Format``."""
        spans = _rows_in(share, piece)
        num_rows = sum(rows for _, rows, _ in spans)
        means = packet[: 8 * num_rows].view(torch.float32).view(-1, 2).to(out.dtype)
        _signs_to(packet[8 * num_rows :], out)
        at = 0
        for first, rows, numel in spans:
            high, low = means[at : at + rows].unsqueeze(2).unbind(1)
            matrix = out[first : first + rows * numel].view(rows, numel)
            high, low = high / 2, low / 2  # halved first, since the sum may overflow
            matrix.mul_(high - low).add_(high + low)
            at += rows


def _parts(matrix: Tensor, counts: tuple[Tensor, Tensor]) -> Tensor:
    """Return, for each row, the means of its nonnegative and of its negative values."""
    sums = matrix.clamp(min=0).sum(1), matrix.clamp(max=0).sum(1)
    pair = [total / count for total, count in zip(sums, counts, strict=True)]
    return torch.stack(pair, dim=1)


class OneBit(Quantized):
    """Codec that sends one bit per value and two values per row, with error feedback.

    Args:
        warmup_steps: number of steps at the start in which gradients are summed exactly, because
            gradients then change faster than the error feedback corrects.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs".
    """

    def __init__(self, warmup_steps: int = 0) -> None:
        super().__init__(TwoValues(), feedback=True, warmup_steps=warmup_steps)


def _rows_in(share: CodedShare, piece: slice) -> list[tuple[int, int, int]]:
    """Return the rows of tensors in a piece: first element, number of rows, and row length.

    A partial row counts as a shorter row.
    """
    found = []
    for place in share.places:
        start, stop = max(place.first, piece.start), min(place.end, piece.stop)
        while start < stop:
            within = (place.offset + start - place.first) % place.row
            numel = min(place.row - within, stop - start)
            rows = (stop - start) // place.row if numel == place.row else 1
            found.append((start - piece.start, rows, numel))
            start += rows * numel
    return found


def _bits_of(values: Tensor) -> Tensor:
    """Return one bit per value, 1 if the value is at least zero, highest bit first."""
    # NumPy compares in 0.6 of the time that torch takes.
    return torch.from_numpy(np.packbits(values.numpy() >= 0))


_SIGNS = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * 2.0 - 1)


def _signs_to(bits: Tensor, out: Tensor) -> None:
    """Set ``out`` to 1 for each set bit, else -1."""
    table, whole = _SIGNS.to(out.dtype), out.numel() // 8
    torch.index_select(table, 0, bits[:whole].int(), out=out[: whole * 8].view(-1, 8))
    if out.numel() % 8:
        out[whole * 8 :] = table[int(bits[whole])][: out.numel() % 8]
