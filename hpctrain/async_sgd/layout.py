"""Layout of parameters over servers, and the node memory in which gradients and values lie."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.bucket import ALIGN, slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError


class Piece(NamedTuple):
    """What a server has of one parameter."""

    number: int  # of the parameter
    group: int  # of the optimizer
    inside: slice  # elements of the parameter
    block: int
    place: slice  # the same elements in the server's part of the block


@dataclass(frozen=True, slots=True)
class Block:
    """All parameters of one dtype, one behind the other."""

    dtype: torch.dtype
    numel: int
    members: tuple[tuple[int, int], ...]  # number of a parameter, and where it begins


class ParameterLayout:
    """The trained parameters of an optimizer, in blocks that the servers cut evenly."""

    def __init__(self, optimizer: Optimizer, num_servers: int) -> None:
        """Take the parameters that are trained now."""
        self.num_servers = num_servers
        trained = [
            (group, p)
            for group, settings in enumerate(optimizer.param_groups)
            for p in settings["params"]
            if p.requires_grad
        ]
        self.parameters: list[Tensor] = [p for _, p in trained]
        self._groups = [group for group, _ in trained]
        self.blocks: list[Block] = []
        for dtype in dict.fromkeys(p.dtype for p in self.parameters):
            members, end = [], 0
            for number, p in enumerate(self.parameters):
                if p.dtype is dtype:
                    members.append((number, end))
                    end += p.numel()
            self.blocks.append(Block(dtype, end, tuple(members)))

    def describe(self) -> list[tuple[int, tuple[int, ...], str]]:
        """Return what all ranks must have alike: group, shape and dtype of each parameter."""
        both = zip(self._groups, self.parameters, strict=True)
        return [(group, tuple(p.shape), str(p.dtype)) for group, p in both]

    def require_same(self, optimizer: Optimizer) -> None:
        """Raise ``ConfigError`` if other parameters are trained now than at the start."""
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        known = self.parameters
        if len(trained) != len(known) or any(
            a is not b or a.dtype is not b.dtype for a, b in zip(trained, known, strict=True)
        ):
            raise ConfigError(
                f"servers have the parameters that were trained at the start, {len(known)}, and "
                f"now there are {len(trained)}, or others; end the block, and begin another one "
                f"after parameters were frozen, unfrozen, added or replaced"
            )

    def bounds(self, block: int, server: int) -> slice:
        """Return the elements of a block that a server has."""
        return slice_bounds(self.blocks[block].numel, self.num_servers, server)

    def part_numel(self, block: int) -> int:
        """Return how many elements of a block a server has at most, rounded up to cache lines."""
        every = (self.bounds(block, server) for server in range(self.num_servers))
        numel: int = max(part.stop - part.start for part in every)
        return -(-numel // ALIGN) * ALIGN

    def pieces(self, server: int) -> Iterator[Piece]:
        """Yield what a server has, by parameter."""
        for number, block in enumerate(self.blocks):
            own = self.bounds(number, server)
            for member, begin in block.members:
                end = begin + self.parameters[member].numel()
                first, last = max(begin, own.start), min(end, own.stop)
                if first < last:
                    inside = slice(first - begin, last - begin)
                    place = slice(first - own.start, last - own.start)
                    yield Piece(member, self._groups[member], inside, number, place)

    @torch.no_grad()
    def fill(self, flats: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """Copy one tensor for each parameter into whole blocks; zeros stand for None."""
        for block, flat in zip(self.blocks, flats, strict=True):
            for number, begin in block.members:
                tensor, numel = tensors[number], self.parameters[number].numel()
                place = flat[begin : begin + numel]
                if tensor is None:
                    place.zero_()
                else:
                    dense = tensor.to_dense() if tensor.is_sparse else tensor
                    place.copy_(dense.detach().reshape(-1))

    @torch.no_grad()
    def take(self, server: int, parts: Sequence[Tensor]) -> None:
        """Copy the values that a server has into the parameters."""
        for piece in self.pieces(server):
            parameter = self.parameters[piece.number].detach()
            values = parts[piece.block][piece.place]
            if parameter.is_contiguous():
                parameter.view(-1)[piece.inside].copy_(values)
            else:
                flat = parameter.reshape(-1)
                flat[piece.inside] = values.to(flat.device)
                parameter.copy_(flat.view(parameter.shape))


class Buffers:
    """Node memory of each rank: gradients on their way, a server's values, copies for readers.

    What the ranks of a node write here the others read where it lies.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: ParameterLayout,
        mates: Sequence[int],
        num_gradients: int,
        num_copies: int,
    ) -> None:
        """Make it. Collective; ``NodeMemoryError`` on all ranks where there is too little.

        ``mates`` are the ranks of this node, ``num_gradients`` how many whole gradients each rank
        has under way, ``num_copies`` for how many ranks a server keeps copies.
        """
        self._layout, self._num_gradients = layout, num_gradients
        self._mates = list(mates)
        self._of_ranks: dict[int, list[Tensor]] = {}
        self._rank = comm.rank
        for number, block in enumerate(layout.blocks):
            numel = num_gradients * self._stride(number)
            numel += (1 + num_copies) * layout.part_numel(number)
            bucket = comm.new_bucket(numel, block.dtype)
            shared = dict(zip(mates, bucket.peers, strict=True)) if bucket.peers else {}
            for rank, flat in (shared or {comm.rank: bucket.flat}).items():
                self._of_ranks.setdefault(rank, []).append(flat)

    def shares_with(self, rank: int) -> bool:
        """Say whether this rank sees the memory of another."""
        return rank in self._of_ranks

    def copy_for(self, rank: int) -> int:
        """Return the number of the copy that a server keeps for a rank which sees its memory."""
        return 1 + self._mates.index(rank)

    def gradient(self, slot: int) -> list[Tensor]:
        """Return the blocks of one of this rank's gradients."""
        return [
            flat[slot * self._stride(b) :][: self._layout.blocks[b].numel]
            for b, flat in enumerate(self._of_ranks[self._rank])
        ]

    def gradient_of(self, rank: int, slot: int, server: int) -> list[Tensor]:
        """Return what a server needs of a gradient of a rank of this node."""
        return [
            flat[slot * self._stride(b) :][self._layout.bounds(b, server)]
            for b, flat in enumerate(self._of_ranks[rank])
        ]

    def values(self, rank: int, server: int, copy: int = 0) -> list[Tensor]:
        """Return the values of a server, which is a rank of this node, or a copy, from 1 on."""
        found = []
        for b, flat in enumerate(self._of_ranks[rank]):
            bounds = self._layout.bounds(b, server)
            first = self._num_gradients * self._stride(b) + copy * self._layout.part_numel(b)
            found.append(flat[first : first + bounds.stop - bounds.start])
        return found

    def _stride(self, block: int) -> int:
        return -(-self._layout.blocks[block].numel // ALIGN) * ALIGN
