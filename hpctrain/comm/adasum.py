"""Adasum: gradients that say the same are averaged, those that say different things are added."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_arguments import check_tensor, name_of
from hpctrain.comm.tensor_bucket import PackedTensors
from hpctrain.core.errors import CommError
from hpctrain.cost.schedules import NOBODY, Fold, fold

_TAG = 23258
_CHUNK = 1 << 16  # elements that are calculated on at a time, in float64: they stay in the cache
_SMALLEST = torch.finfo(torch.float64).tiny ** 0.5
"""A squared norm below this is zero: a quotient by it may overflow."""


def adasum_(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by the adaptive sum of that of all ranks. Collective.

    Two tensors a and b become ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: their sum if they
    are orthogonal, their mean if they are parallel. Ranks combine pairwise: first neighbours, then
    pairs of neighbours, and so on. Every tensor has products of its own; the tensors travel
    together. A factor common to all ranks is a factor of the result.

    By recursive halving of the vector, as a sum would be: 2 log2(N) messages of 2(N-1)/N of all
    elements together, and at level k another k messages of three numbers for each tensor. Numbers
    travel in float32, or float64 if a tensor is float64; products and sums are formed in float64
    and rounded once at each level. All ranks get the same bits.

    Differs from the source where N is no power of two: the odd ones of the first 2r ranks (r above
    the power of two) combine with their neighbours first, and where a stands for n ranks and b for
    m the two halves above are n/(n+m) and m/(n+m). So N parallel tensors become their mean for
    every N, where each rank counts the same.

    Only ``send`` and ``recv_`` of ``comm`` are used. ``CommError`` if a tensor is not floating
    point, dense and on the CPU, or the ranks give different sizes; any layout will do.

    Source: Maleki et al. 2021, "Scaling distributed training with adaptive summation", MLSys.
    """
    for tensor in tensors:
        check_tensor(tensor)
        if not tensor.is_floating_point():
            raise CommError(
                f"Adasum needs floating point tensors, got {name_of(tensor.dtype)}; convert them, "
                f"or take the sum"
            )
    if comm.size == 1 or not any(tensor.numel() for tensor in tensors):
        return
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    numels = [tensor.numel() for tensor in tensors]
    with torch.no_grad():
        packed = PackedTensors.copied([*tensors], dtype)
        _Combining(comm, packed.flat, numels).run()
        packed.unpack(tensors)


class _Partner(NamedTuple):
    """With whom this rank combines at one level."""

    rank: int
    weight: float  # of this rank's side; the other one has what is missing to 1
    group: tuple[int, ...]
    """Ranks to exchange with, one after the other, to sum over all that hold a part of the two."""


class _Span(NamedTuple):
    """Elements of the flat vector from ``start`` to ``stop``."""

    start: int
    stop: int

    def halves(self, *, is_upper: bool) -> "tuple[_Span, _Span]":
        """Return the half that a rank keeps, and the other."""
        middle = self.start + (self.stop - self.start) // 2
        lower, upper = _Span(self.start, middle), _Span(middle, self.stop)
        return (upper, lower) if is_upper else (lower, upper)


class _Combining:
    """The vector of this rank on its way to the result."""

    def __init__(self, comm: Communicator, flat: Tensor, numels: Sequence[int]) -> None:
        self._comm = comm
        self._flat = flat
        self._ends = torch.tensor(numels).cumsum(0).tolist()
        self._inbox = torch.empty((flat.numel() + 1) // 2, dtype=flat.dtype)

    def run(self) -> None:
        """Combine with all other ranks."""
        comm, flat = self._comm, self._flat
        folded = fold(comm.rank, comm.size)
        place, other = folded.place, folded.other
        whole = _Span(0, flat.numel())
        if other != NOBODY:
            kept, given = self._combine_half(whole, _Partner(other, 0.5, (other,)))
            if place == NOBODY:
                comm.send(self._of(kept), other, _TAG)
                comm.recv_(flat, other, _TAG)
                return
            comm.recv_(self._of(given), other, _TAG)
        way_back = []
        distance, span = 1, whole
        while distance < folded.power:
            partner = _partner(folded, distance)
            kept, given = self._combine_half(span, partner)
            way_back.append((kept, given, partner.rank))
            span, distance = kept, 2 * distance
        for kept, given, rank in reversed(way_back):
            self._exchange(self._of(kept), self._of(given), rank)
        if other != NOBODY:
            comm.send(flat, other, _TAG)

    def _combine_half(self, span: _Span, partner: _Partner) -> tuple[_Span, _Span]:
        """Combine one half of ``span`` with the partner's, who combines the other half."""
        is_upper = partner.rank < self._comm.rank
        kept, given = span.halves(is_upper=is_upper)
        theirs = self._inbox[: kept.stop - kept.start]
        self._exchange(self._of(given), theirs, partner.rank)
        products = self._products(kept, theirs, is_upper=is_upper)
        for rank in partner.group:
            others = torch.empty_like(products)
            self._exchange(products, others, rank)
            products += others
        self._add(kept, theirs, products, partner.weight, is_upper=is_upper)
        return kept, given

    def _products(self, kept: _Span, theirs: Tensor, *, is_upper: bool) -> Tensor:
        """Return, for each tensor, a.a, a.b and b.b of the elements here; a is the lower side."""
        products = torch.zeros(len(self._ends), 3, dtype=torch.float64)
        for index, part, at in self._chunks(kept):
            both = torch.stack((part, theirs[at : at + part.numel()])).double()
            gram = both @ both.T
            products[index, 0] += gram[1, 1] if is_upper else gram[0, 0]
            products[index, 1] += gram[0, 1]
            products[index, 2] += gram[0, 0] if is_upper else gram[1, 1]
        return products

    def _add(
        self, kept: _Span, theirs: Tensor, products: Tensor, weight: float, *, is_upper: bool
    ) -> None:
        factors = []
        for a_a, a_b, b_b in products.tolist():
            mine, other = (b_b, a_a) if is_upper else (a_a, b_b)
            factors.append((_factor(a_b, mine, weight), _factor(a_b, other, 1.0 - weight)))
        for index, part, at in self._chunks(kept):
            # In float64: where one side is tiny its factor may be beyond float32.
            both = torch.stack((part, theirs[at : at + part.numel()])).double()
            part.copy_(torch.tensor(factors[index], dtype=torch.float64) @ both)

    def _chunks(self, span: _Span) -> Iterator[tuple[int, Tensor, int]]:
        """Cut ``span`` at the ends of tensors and into chunks.

        Yields the tensor's index, the elements, and where they start within the span.
        """
        start = 0
        for index, end in enumerate(self._ends):
            first, last = max(start, span.start), min(end, span.stop)
            start = end
            if first < last:
                at = first - span.start
                for part in self._flat[first:last].split(_CHUNK):
                    yield index, part, at
                    at += part.numel()

    def _of(self, span: _Span) -> Tensor:
        return self._flat[span.start : span.stop]

    def _exchange(self, outgoing: Tensor, incoming: Tensor, partner: int) -> None:
        # One after the other: a send may last until the other side receives.
        if self._comm.rank < partner:
            self._comm.send(outgoing, partner, _TAG)
            self._comm.recv_(incoming, partner, _TAG)
        else:
            self._comm.recv_(incoming, partner, _TAG)
            self._comm.send(outgoing, partner, _TAG)


def _partner(folded: Fold, distance: int) -> _Partner:
    """Return with whom a rank combines; the first ``num_pairs`` stand for two."""
    place, num_pairs = folded.place, folded.num_pairs

    def weight(block: int) -> int:
        first = block * distance
        return distance + max(0, min(num_pairs - first, distance))

    mine, other = weight(place // distance), weight((place ^ distance) // distance)
    group = [folded.rank_at(place ^ (1 << level)) for level in range(distance.bit_length())]
    return _Partner(folded.rank_at(place ^ distance), mine / (mine + other), tuple(group))


def _factor(product: float, norm: float, weight: float) -> float:
    """Return what is left of a vector when its share of what both have in common is taken off."""
    return 1.0 - weight * product / norm if norm >= _SMALLEST else 1.0
