"""Base of codecs whose codes cannot be added, so that each rank decodes and sums one piece.

    values   -> K pieces; coded piece r is sent to rank r    (reduce-scatter)
    rank r   -> decodes K codes, sums them, codes the sum
    sum      -> is sent to all ranks, which decode it        (all-gather)

Each rank sends 2 (K - 1) / K times the size of the encoded values, as in a ring all-reduce, and
the results are bitwise identical on all ranks. With error feedback, the errors of both encodings
(of the pieces and of the sum) are stored and added in the next step. Many values are divided into
chunks: a rank encodes one chunk and decodes another while a third is in flight.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.bucket import slice_bounds
from hpctrain.comm.communicator import Internode
from hpctrain.compress.rail_codec import CodedShare, RailCodec
from hpctrain.core.checks import Count, checked

_CHUNK = 1 << 18
"""Number of values per piece of a chunk."""


@cache
def _zeros(dtype: torch.dtype) -> Tensor:
    return torch.zeros(_CHUNK, dtype=dtype)


def is_finite(values: Tensor) -> bool:
    """Return True if all values are finite."""
    # 0 times a non-finite value is NaN; a sum takes three times as long and may overflow.
    zeros = _zeros(values.dtype)
    parts = values.reshape(-1).split(_CHUNK)
    return not any(torch.dot(part, zeros[: part.numel()]) for part in parts)


class Format(Protocol):
    """Encoding of values, whose size depends only on the number of values."""

    unit: int
    """Values are divided into pieces at multiples of this number."""

    def num_bytes(self, share: CodedShare, piece: slice) -> int:
        """Return the size of the encoded values of ``piece`` in bytes."""

    def pack(self, share: CodedShare, piece: slice, values: Tensor) -> Tensor:
        """Encode ``values``, a flat float32 or float64 tensor, as uint8."""

    def unpack(self, share: CodedShare, piece: slice, packet: Tensor, out: Tensor) -> None:
        """Decode ``packet``, and store the values in ``out``."""


class Quantized(RailCodec):
    """Base class of codecs that send values in a ``Format``.

    Args:
        form: encoding of the values.
        feedback: whether the errors of both encodings are added in the next step.
        warmup_steps: number of steps at the start in which gradients are summed exactly.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", for two encodings with residuals.
    """

    def __init__(self, form: Format, *, feedback: bool, warmup_steps: int = 0) -> None:
        super().__init__()
        checked("warmup_steps", warmup_steps, Count)
        self._form, self.keeps_unsent, self._warmup_steps = form, feedback, warmup_steps

    def bytes_of(self, share: CodedShare) -> int:
        """Return the size of all encoded values in bytes; see ``RailCodec``."""
        return self._form.num_bytes(share, slice(0, share.numel))

    def reduce_(self, share: CodedShare, values: Tensor, link: Internode) -> None:
        """Exchange pieces, sum this rank's piece, and exchange the sums; see ``RailCodec``."""
        if share.num_steps < self._warmup_steps:
            link.allreduce_(values).wait()
            return
        length = _CHUNK * link.size
        chunks = (
            slice(start, min(start + length, share.numel))
            for start in range(0, share.numel, length)
        )
        in_flight: deque[Iterator[None]] = deque(maxlen=3)  # a chunk is complete after three turns
        for chunk in chain(chunks, (None, None)):
            in_flight.appendleft(
                iter(()) if chunk is None else self._turns(share, chunk, values, link)
            )
            for turns in in_flight:
                next(turns, None)

    def _turns(
        self, share: CodedShare, chunk: slice, values: Tensor, link: Internode
    ) -> Iterator[None]:
        """Exchange the pieces of a chunk, sum this rank's piece, and exchange the sums.

        Yields while messages are in flight, to process other chunks.
        """
        form, numel = self._form, chunk.stop - chunk.start
        bounds = (slice_bounds(numel, link.size, rank, form.unit) for rank in range(link.size))
        pieces = [slice(chunk.start + b.start, chunk.start + b.stop) for b in bounds]
        own = pieces[link.rank]
        early = share.remembered("error") if self.keeps_unsent else None
        late = share.remembered("late error") if self.keeps_unsent else None
        packets = [self._coded(share, piece, values, early) for piece in pieces]
        arrived = link.start_alltoall(packets, [form.num_bytes(share, own)] * link.size)
        yield
        self._sum(share, own, arrived(), values)
        mine = self._coded(share, own, values, late)
        sizes = [form.num_bytes(share, piece) for piece in pieces]
        arrived = link.start_alltoall([mine] * link.size, sizes)
        yield
        for piece, packet in zip(pieces, arrived(), strict=True):
            form.unpack(share, piece, packet, values[piece])

    def _coded(
        self, share: CodedShare, piece: slice, values: Tensor, memory: Tensor | None
    ) -> Tensor:
        """Add the error in ``memory`` to a piece, encode the sum, and store the new error."""
        form, wanted = self._form, values[piece]
        if memory is None:
            return form.pack(share, piece, wanted)
        error = memory[piece]
        wanted.add_(error)
        packet = form.pack(share, piece, wanted)
        form.unpack(share, piece, packet, error)
        torch.sub(wanted, error, out=error)
        return packet

    def _sum(
        self, share: CodedShare, own: slice, packets: Sequence[Tensor], values: Tensor
    ) -> None:
        """Set this rank's piece to the sum of the decoded packets, in the order of the ranks."""
        total = values[own]
        value = torch.empty_like(total)
        self._form.unpack(share, own, packets[0], total)
        for packet in packets[1:]:
            self._form.unpack(share, own, packet, value)
            total.add_(value)
