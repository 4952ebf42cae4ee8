"""Adasum: an adaptive sum that averages parallel gradients and adds orthogonal gradients."""

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
_CHUNK = 1 << 16  # elements converted to float64 at a time, which fit the cache
_SMALLEST = torch.finfo(torch.float64).tiny ** 0.5
"""A smaller squared norm counts as zero, since a division by such a norm may overflow."""


def adasum_(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its adaptive sum over the ranks. Collective.

    The adaptive sum of a and b is ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: their sum if
    they are orthogonal, their mean if they are parallel. Ranks combine in a binary tree. The
    products are computed separately for each tensor, but all tensors are sent in one message. If
    all ranks multiply a tensor by the same factor, the result is multiplied by this factor.

    The algorithm is recursive halving, as for a sum: each rank sends 2 log2(N) messages with
    2(N-1)/N of all elements in total, and, at level k, k additional messages with three
    numbers per tensor. Elements are sent in float32, or float64 if any tensor is float64. Products
    and sums are computed in float64 and rounded once per level. Results are bitwise identical on
    all ranks.

    Only ``send`` and ``recv_`` of ``comm`` are used.

    Args:
        comm: the ranks.
        tensors: floating-point tensors on the CPU, of any layout in memory, with the same sizes
            on every rank.

    Raises:
        CommError: a tensor is not floating point, not dense or not on the CPU, or sizes differ
            between ranks.

    Source: Maleki et al. 2021, "Scaling distributed training with adaptive summation", MLSys.
    Differs: for N = 2^p + r ranks, the odd ranks of the first 2r combine with their neighbours
    first. If a is the result of n ranks and b of m ranks, the weights 1/2 above are n/(n+m) and
    m/(n+m), so that N parallel tensors give their mean for every N.
    """
    for tensor in tensors:
        check_tensor(tensor)
        if not tensor.is_floating_point():
            raise CommError(
                f"tensors of Adasum must be floating point, got {name_of(tensor.dtype)}; convert "
                "them, or use the sum"
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
    """Rank with which this rank combines vectors at one level of the tree."""

    rank: int
    weight: float  # weight of this rank's vector; the partner's has 1 - weight
    group: tuple[int, ...]
    """Ranks with which this rank exchanges and sums dot products, in this order."""


class _Span(NamedTuple):
    """Elements of the flat vector from ``start`` to ``stop``."""

    start: int
    stop: int

    def halves(self, *, is_upper: bool) -> "tuple[_Span, _Span]":
        """Return the half of the span that this rank keeps, and the half that this rank sends."""
        middle = self.start + (self.stop - self.start) // 2
        lower, upper = _Span(self.start, middle), _Span(middle, self.stop)
        return (upper, lower) if is_upper else (lower, upper)


class _Combining:
    """Computes one adaptive sum by recursive halving.

    Args:
        comm: the ranks.
        flat: elements of all tensors, replaced by the result.
        numels: number of elements of each tensor.
    """

    def __init__(self, comm: Communicator, flat: Tensor, numels: Sequence[int]) -> None:
        self._comm = comm
        self._flat = flat
        self._ends = torch.tensor(numels).cumsum(0).tolist()
        self._inbox = torch.empty((flat.numel() + 1) // 2, dtype=flat.dtype)

    def run(self) -> None:
        """Replace the flat vector by the adaptive sum over the ranks. Collective."""
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
        """Combine half of ``span`` with the partner's half; return the kept and the sent half."""
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
        """Return the dot products a.a, a.b and b.b of each tensor over ``kept``.

        The vector a belongs to the lower rank, b to the higher rank.
        """
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
            # In float64: if one side is tiny, its factor may exceed the range of float32.
            both = torch.stack((part, theirs[at : at + part.numel()])).double()
            part.copy_(torch.tensor(factors[index], dtype=torch.float64) @ both)

    def _chunks(self, span: _Span) -> Iterator[tuple[int, Tensor, int]]:
        """Split ``span`` into chunks, each with elements of a single tensor.

        Yields:
            The index of the tensor, the elements, and their offset in the span.
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
        # A send may block until the partner receives, so the lower rank sends first.
        if self._comm.rank < partner:
            self._comm.send(outgoing, partner, _TAG)
            self._comm.recv_(incoming, partner, _TAG)
        else:
            self._comm.recv_(incoming, partner, _TAG)
            self._comm.send(outgoing, partner, _TAG)


def _partner(folded: Fold, distance: int) -> _Partner:
    """Return this rank's partner at the level where partners are ``distance`` positions apart.

    Each of the first ``num_pairs`` positions represents two ranks and has twice the weight.
    """
    place, num_pairs = folded.place, folded.num_pairs

    def weight(block: int) -> int:
        first = block * distance
        return distance + max(0, min(num_pairs - first, distance))

    mine, other = weight(place // distance), weight((place ^ distance) // distance)
    group = [folded.rank_at(place ^ (1 << level)) for level in range(distance.bit_length())]
    return _Partner(folded.rank_at(place ^ distance), mine / (mine + other), tuple(group))


def _factor(product: float, norm: float, weight: float) -> float:
    """Return the factor of a vector in the adaptive sum; ``norm`` is the vector's squared norm."""
    return 1.0 - weight * product / norm if norm >= _SMALLEST else 1.0
