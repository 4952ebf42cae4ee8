"""``NodeBucket``, which stores parameters and optimizer state that the ranks of a node share.

Parameters and state are in node memory. A step processes this rank's pieces of the parameters in
chunks, with their state and the gradients of all ranks.
"""

import math
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate, chain
from mmap import PAGESIZE
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.bucket import slice_bounds
from hpctrain.comm.node.segments import LINE_BYTES
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.comm.ops import Combination, Op, combination
from hpctrain.gradients.elementwise import StateSpec
from hpctrain.gradients.gradient_bucket import GradientBucket, Slot

_STATE_BYTES = 2 << 20
"""Bytes of state per chunk: a chunk fits into the last-level cache, and the overhead of a torch
optimizer's step, 10 to 40 us, is small."""
_BLOCK_BYTES = 512 << 10  # bytes of gradients that are summed and scaled in the L2 cache
_HALVES = (torch.bfloat16, torch.float16)
_CUT = 64
"""Pieces begin at multiples of this number of elements, for vector instructions."""


class NodeTensor:
    """Values of one dtype in node memory. Each rank maps this memory twice, shared and private.

    Steps write to the shared map, and the program uses the private map; see ``node_values``. The
    constructor is collective over the node. The values are initially zeros.
    """

    def __init__(self, node: SharedMemory, numel: int, dtype: torch.dtype) -> None:
        self._region, self._dtype = node.new_region(numel * dtype.itemsize), dtype
        self.shared = torch.frombuffer(self._region.shared, dtype=dtype, count=max(numel, 1))

    def place(self, like: Tensor, first: int) -> Tensor:
        """Return a view, shaped like ``like``, of the shared values from element ``first``."""
        return _formed(self.shared[first : first + like.numel()], like)

    def shown(self, like: Tensor, first: int) -> Tensor:
        """Return a view, shaped like ``like``, of the private map from element ``first``."""
        if not like.numel():
            return torch.empty_like(like, dtype=self._dtype)
        place = self._dtype.itemsize * first
        flat = torch.frombuffer(
            self._region.private, dtype=self._dtype, offset=place, count=like.numel()
        )
        return _formed(flat, like)

    @property
    def num_pages(self) -> int:
        """Number of memory pages."""
        return len(self._region.private) // PAGESIZE

    def find_stores(self, first_page: int, num_pages: int) -> bool:
        """Return whether this process has written to these pages of its private map."""
        return self._region.find_stores(first_page, min(num_pages, self.num_pages - first_page))

    def forget_stores(self) -> None:
        """Discard this process's stores to the private map, which then has the shared values."""
        self._region.forget_stores()

    def freeze_in_children(self) -> None:
        """Preserve, in a forked child, the values at the time of the fork."""
        self._region.freeze_in_children()

    def end_step(self) -> None:
        """Discard the copy for forked children, so that later children have the current values."""
        self._region.forget_kept()


MASTER = "master"
"""Name of the master copy in the state of a 16-bit parameter."""


class ParameterPiece:
    """A part of a parameter, or a whole parameter, that this rank updates.

    Args:
        number: index of the parameter in its bucket.
        bounds: range of the piece in the elements of the bucket.
        start: index of the piece's first element in the flattened parameter.
        like: tensor with the shape and strides of the piece.
        group: index of the optimizer's parameter group.
    """

    __slots__ = (
        "bounds",
        "grad",
        "group",
        "like",
        "number",
        "rounded",
        "start",
        "state",
        "values",
    )

    grad: Tensor  # average gradient, while the chunk is processed
    values: Tensor  # values that the optimizer updates
    rounded: Tensor  # values in the model, rounded to 16 bits if ``values`` is a master copy

    def __init__(self, number: int, bounds: slice, start: int, like: Tensor, group: int) -> None:
        self.number, self.bounds, self.group = number, bounds, group
        self.start = start
        self.like = like
        self.state: dict[str, Tensor] = {}
        """State of the optimizer, in node memory."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the view of this piece in ``flat``, the flattened parameter."""
        return _formed(flat[self.start : self.start + self.like.numel()], self.like)


def by_group(pieces: Sequence[ParameterPiece]) -> Mapping[int, list[Tensor]]:
    """Return the values of the pieces, by parameter group of the optimizer."""
    found: dict[int, list[Tensor]] = {}
    for piece in pieces:
        found.setdefault(piece.group, []).append(piece.values)
    return found


class Change(NamedTuple):
    """An elementwise change of averaged gradients by clipping or unscaling, equal on all ranks."""

    bound: float | None = None  # largest absolute value of an element
    factor: float | None = None  # factor of all elements

    def __call__(self, grad: Tensor) -> None:
        """Apply the change to the gradient of a piece, in place."""
        if self.bound is not None:
            grad.clamp_(-self.bound, self.bound)
        if self.factor is not None:
            grad.mul_(self.factor)


class Chunk:
    """Consecutive pieces that fit the cache, with the gradients of all ranks of the node."""

    __slots__ = ("blocks", "bounds", "groups", "parts", "pieces", "total")

    def __init__(
        self,
        pieces: Sequence[ParameterPiece],
        peers: Sequence[Tensor],
        scratch: Tensor,
        how: Combination,
    ) -> None:
        self.pieces, self.groups = pieces, by_group(pieces)
        self.bounds = slice(pieces[0].bounds.start, pieces[-1].bounds.stop)
        self.parts = tuple(peer[self.bounds].view(how.storage_dtype) for peer in peers)
        first = self.bounds.start
        total = scratch[: self.bounds.stop - first]
        self.total = total.view(how.storage_dtype) if total.dtype is peers[0].dtype else total
        size = _BLOCK_BYTES // self.total.itemsize
        cut = [one.split(size) for one in (self.total, *self.parts)]
        self.blocks = [(out, parts) for out, *parts in zip(*cut, strict=True)]
        """Blocks of ``total``, each with the gradients that are summed into the block."""
        for piece in pieces:
            own = total[piece.bounds.start - first : piece.bounds.stop - first]
            piece.values.grad = piece.grad = _formed(own, piece.like)


class NodeBucket:
    """The parameters of one gradient bucket, and their optimizer state, in node memory.

    The constructor allocates the parameters; it is collective over the node.

    Args:
        node: memory that the ranks of the node share.
        gradients: bucket of the gradients.
        master_dtype: dtype of the master copies of 16-bit parameters; None for no copies.
    """

    def __init__(
        self, node: SharedMemory, gradients: GradientBucket, master_dtype: torch.dtype | None
    ) -> None:
        bucket = gradients.bucket
        self.slots: Sequence[Slot] = gradients.slots
        self.dtype, self.peers = bucket.flat.dtype, bucket.peers
        self.has_masters = master_dtype is not None and self.dtype in _HALVES
        self.step_dtype = master_dtype if master_dtype and self.has_masters else self.dtype
        self.how = combination(self.dtype, Op.SUM)
        self.num_elements = gradients.flat.numel()
        self.offsets = gradients.offsets
        self._node = node
        self.values = NodeTensor(node, self.num_elements, self.dtype)
        self.values.freeze_in_children()
        self.state: dict[str, NodeTensor] = {}
        self.parts: Sequence[Mapping[str, StateSpec]] = ()
        """For each parameter, dtype and shape of its state tensors after a step, by name."""
        self._rooms: dict[str, tuple[torch.dtype, list[int]]] = {}
        """Maps the name of a state tensor to its dtype and to the offset of each parameter."""
        self.shown: list[dict[str, Tensor]] = [{} for _ in self.slots]
        """State of each parameter as the program sees it, in the private map."""
        self.chunks: list[Chunk] = []

    @property
    def chunk_numel(self) -> int:
        """Number of elements per chunk, for parameters that can be divided."""
        parts = {name: one for each in self.parts for name, one in each.items() if name != MASTER}
        num_parts = sum(part.shape is None for part in parts.values())
        return _STATE_BYTES // max(num_parts, 1) // self.step_dtype.itemsize // _CUT * _CUT

    def cut(self, groups: Sequence[int], owned: Set[Slot] | None) -> list[list[ParameterPiece]]:
        """Return the pieces of this rank, as one list per chunk.

        Args:
            groups: index of the parameter group of each parameter.
            owned: slots whose parameters this rank updates as a whole; None to update the slice of
                this rank. A parameter without elements may have state, and is a separate piece.
        """
        node, limit = self._node, self.chunk_numel
        mine = slice_bounds(self.num_elements, node.local_size, node.local_rank)
        chunks, empty = list[list[ParameterPiece]](), list[list[ParameterPiece]]()
        for number, (first, slot) in enumerate(zip(self.offsets, self.slots, strict=True)):
            numel = slot.view.numel()
            low, high = (_cut_at(bound - first, numel) for bound in (mine.start, mine.stop))
            if owned is not None:
                limit, low, high = max(numel, 1), 0, numel if slot in owned else 0
            is_empty = not numel and (node.local_rank == 0 if owned is None else slot in owned)
            for at in (0,) if is_empty else range(low, high, limit):
                stop = min(at + limit, high)
                like = slot.view if owned is not None else self.peers[0][at:stop]
                piece = ParameterPiece(
                    number, slice(first + at, first + stop), at, like, groups[number]
                )
                piece.rounded = piece.values = self.values.place(like, first + at)
                if self.has_masters:
                    piece.values = self._place(piece, MASTER)
                if is_empty:
                    empty.append([piece])
                    continue
                first_of = chunks[-1][0].bounds.start if chunks else 0
                if not chunks or owned is not None or first + stop - first_of > limit:
                    chunks.append([])
                chunks[-1].append(piece)
        return chunks + empty

    def make_room(self, parts: Sequence[Mapping[str, StateSpec]]) -> None:
        """Allocate the optimizer state that ``parts`` specifies for each parameter.

        Collective over the node.
        """
        self.parts, line = parts, LINE_BYTES // self.dtype.itemsize
        for name in dict.fromkeys(chain(*parts)):
            found = [of.get(name, StateSpec(self.dtype, (0,))) for of in parts]
            numels = [
                slot.view.numel() if part.shape is None else math.prod(part.shape)
                for slot, part in zip(self.slots, found, strict=True)
            ]
            bounds = [0, *accumulate(-(-numel // line) * line for numel in numels)]
            room = next(of[name].dtype for of in parts if name in of), bounds
            if self._rooms.get(name) != room:
                self._rooms[name] = room
                self.state[name] = NodeTensor(self._node, bounds[-1], room[0])

    def private_view(self, number: int, name: str) -> Tensor:
        """Return the state ``name`` of the parameter with index ``number``, in the private map."""
        like, shape = self.slots[number].view, self.parts[number][name].shape
        like = like if shape in (None, like.shape) else torch.empty(shape)
        return self.state[name].shown(like, self._rooms[name][1][number])

    def keep(self, piece: ParameterPiece, made: dict[str, Any]) -> None:
        """Replace the new state tensors in ``made`` by copies of them in node memory."""
        for name, value in made.items():
            place = piece.state.get(name)
            if value is place or value is None:
                continue
            if place is None:
                place = piece.state[name] = self._place(piece, name)
            place.copy_(value)
            made[name] = place

    def _place(self, piece: ParameterPiece, name: str) -> Tensor:
        part, first = self.parts[piece.number][name], self._rooms[name][1][piece.number]
        if part.shape is None:
            return self.state[name].place(piece.like, first + piece.start)
        if piece.start:  # only the rank with the parameter's first element stores this state
            return torch.empty(part.shape, dtype=part.dtype)
        is_like = part.shape == piece.like.shape
        return self.state[name].place(piece.like if is_like else torch.empty(part.shape), first)


def _formed(flat: Tensor, like: Tensor) -> Tensor:
    return flat.as_strided(like.shape, like.stride())


def _cut_at(bound: int, numel: int) -> int:
    return min(max(-(-bound // _CUT) * _CUT, 0), numel)
