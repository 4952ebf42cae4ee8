"""Layout of parameters over servers, and the node memory in which gradients and values lie."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.bucket import ALIGN, slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError

VALUES = -1
"""The slot of a rank in which servers write the values that it has asked for."""


class Piece(NamedTuple):
    """What a server has of one parameter."""

    number: int  # of the parameter
    group: int  # of the optimizer
    inside: slice | int  # elements of the parameter; a number where that is one, as steps round
    block: int
    place: slice | int  # the same elements in the server's part of the block


class Block(NamedTuple):
    """All parameters of one dtype, one behind the other.

    Each begins at a multiple of 64 elements, where servers may cut it, and lies there in its order
    in memory: so their steps round as one of the whole, by kernels that take 64 elements at once.
    """

    dtype: torch.dtype
    numel: int
    members: list[tuple[int, int]]  # number of a parameter, and where it begins


class ParameterLayout:
    """The trained parameters of an optimizer, in blocks that the servers cut evenly."""

    def __init__(self, optimizer: Optimizer, num_servers: int) -> None:
        """Take the parameters that are trained now."""
        self._num_servers = num_servers
        groups = enumerate(optimizer.param_groups)
        found = [(g, p) for g, group in groups for p in group["params"] if p.requires_grad]
        self._groups = [group for group, _ in found]
        self.parameters: list[Tensor] = [p for _, p in found]
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        self.blocks: list[Block] = []
        for dtype in dict.fromkeys(p.dtype for p in self.parameters):
            numbers = [n for n, p in enumerate(self.parameters) if p.dtype is dtype]
            rooms = (-(-self.parameters[n].numel() // ALIGN) * ALIGN for n in numbers)
            *begins, end = accumulate(rooms, initial=0)
            if end:  # nobody steps what is empty
                self.blocks.append(Block(dtype, end, [*zip(numbers, begins, strict=True)]))

    def describe(self) -> list[str]:
        """Return what all ranks must have alike: group, shape and dtype of each parameter."""
        both = zip(self._groups, self.parameters, strict=True)
        return [f"{(group, tuple(p.shape), str(p.dtype))}" for group, p in both]

    def require_same(self, optimizer: Optimizer) -> None:
        """Raise ``ConfigError`` if other parameters are trained now than at the start."""
        now = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if [*map(id, now)] != [*map(id, self.parameters)] or any(
            self.parameters[n].dtype is not b.dtype for b in self.blocks for n, _ in b.members
        ):
            raise ConfigError(
                f"servers have the parameters that were trained at the start, "
                f"{len(self.parameters)}, and now there are {len(now)}, or others; end the "
                f"block, and begin another one after parameters were frozen, unfrozen, added or "
                f"replaced"
            )

    def parts(self, flats: Sequence[Tensor], server: int) -> list[Tensor]:
        """Return what a server has of whole blocks."""
        return [flat[slice_bounds(len(flat), self._num_servers, server)] for flat in flats]

    def pieces(self, server: int) -> Iterator[Piece]:
        """Yield what a server has, by parameter."""
        for number, block in enumerate(self.blocks):
            own = slice_bounds(block.numel, self._num_servers, server)
            for member, begin in block.members:
                end = begin + self.parameters[member].numel()
                first, last = max(begin, own.start), min(end, own.stop)
                if first < last:
                    is_number = not self.parameters[member].dim()
                    inside, place = (
                        first - start if is_number else slice(first - start, last - start)
                        for start in (begin, own.start)
                    )
                    yield Piece(member, self._groups[member], inside, number, place)

    @torch.no_grad()
    def fill(self, flats: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """Copy one tensor for each parameter into whole blocks; zeros stand for None."""
        for number, place in self._places(flats):
            tensor = tensors[number]
            if tensor is None:
                place.zero_()
            else:
                place.copy_(tensor.to_dense() if tensor.is_sparse else tensor)

    @torch.no_grad()
    def take(self, flats: Sequence[Tensor]) -> None:
        """Copy whole blocks of values into the parameters."""
        for number, place in self._places(flats):
            self.parameters[number].copy_(place)

    def _places(self, flats: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield each parameter's number, and where it lies in the blocks, in its shape."""
        for block, flat in zip(self.blocks, flats, strict=True):
            for number, begin in block.members:
                yield number, self.shaped(number, flat[begin:])

    def shaped(self, number: int, flat: Tensor) -> Tensor:
        """Return the first elements of a row in the shape of a parameter."""
        return flat.as_strided(self.parameters[number].shape, self._strides[number])

    def row(self, number: int, values: Tensor) -> Tensor:
        """Return a copy of what belongs to the elements of a parameter, the reverse."""
        row = torch.empty(self.parameters[number].numel(), dtype=values.dtype)
        self.shaped(number, row).copy_(values)
        return row


class Slots:
    """Whole blocks in the node memory of each rank: gradients under way, and values it asked for.

    What the ranks of a node write here the others read where it lies.
    """

    def __init__(
        self, comm: Communicator, layout: ParameterLayout, mates: Sequence[int], num_slots: int
    ) -> None:
        """Make so many in each rank. Collective; ``NodeMemoryError`` on all ranks for too many.

        ``mates`` are the ranks of this node.
        """
        self._of_ranks: dict[int, list[Tensor]] = {comm.rank: []}
        for block in layout.blocks:
            stride = -(-block.numel // ALIGN) * ALIGN
            bucket = comm.new_bucket(num_slots * stride, block.dtype)
            shared = dict(zip(mates, bucket.peers, strict=True)) if bucket.peers else {}
            for rank, flat in (shared or {comm.rank: bucket.flat}).items():
                slots = flat.view(num_slots, stride)[:, : block.numel]
                self._of_ranks.setdefault(rank, []).append(slots)

    def __contains__(self, rank: int) -> bool:
        """Say whether this rank sees the memory of another."""
        return rank in self._of_ranks

    def of(self, rank: int, slot: int) -> list[Tensor]:
        """Return the blocks in a slot of a rank whose memory is seen here."""
        return [slots[slot] for slots in self._of_ranks[rank]]
