"""Layout of parameters over servers, and the node memory of gradients and values."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.bucket import ALIGN, slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tensor_bucket import PackedTensors
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import version_of

VALUES = -1
"""The slot of a rank in which servers write the values that it has requested."""


class ParameterRange(NamedTuple):
    """Elements of one parameter that one server stores."""

    number: int  # of the parameter
    group: int  # of the optimizer
    inside: slice | int  # elements of the parameter; an integer if it is a scalar, as steps round
    block: int
    place: slice | int  # the same elements in the server's part of the block


class DtypeBlock(NamedTuple):
    """Concatenation of all parameters of one dtype.

    Each parameter begins at a multiple of 64 elements, in its memory order. Blocks are cut only
    at these multiples: kernels process 64 elements at a time, so steps on parts round as a step
    on the whole parameter.
    """

    numbers: list[int]  # of its parameters
    packed: PackedTensors  # their places; the buffer has no memory


class ParameterLayout:
    """Layout of the trained parameters of an optimizer in blocks, divided evenly among servers.

    Args:
        optimizer: the layout contains its currently trained parameters.
        names: names of parameters, by ``id``.
        num_servers: parts of each block.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], num_servers: int) -> None:
        self._num_servers = num_servers
        groups = enumerate(optimizer.param_groups)
        found = [(g, p) for g, group in groups for p in group["params"] if p.requires_grad]
        self._groups = [group for group, _ in found]
        self.parameters: list[Tensor] = [p for _, p in found]
        self.names = [names[id(p)] for p in self.parameters]
        self._forms: dict[int, Tensor] = {}  # shapes and strides in blocks
        self.blocks: list[DtypeBlock] = []
        for dtype in dict.fromkeys(p.dtype for p in self.parameters):
            numbers = [n for n, p in enumerate(self.parameters) if p.dtype is dtype]
            sizes = (-(-self.parameters[n].numel() // ALIGN) * ALIGN for n in numbers)
            *begins, end = accumulate(sizes, initial=0)
            if end:  # empty parameters need no server
                members = [self.parameters[n] for n in numbers]
                flat = torch.empty(end, dtype=dtype, device="meta")
                packed = PackedTensors(flat, members, begins, keeps_strides=True)
                self.blocks.append(DtypeBlock(numbers, packed))
                self._forms |= zip(numbers, packed.places, strict=True)

    def describe(self) -> list[str]:
        """Return name, group, shape and dtype of each parameter, the same on all ranks."""
        every = zip(self.names, self._groups, self.parameters, strict=True)
        return [f"{name} {(group, tuple(p.shape), str(p.dtype))}" for name, group, p in every]

    def require_same(self, optimizer: Optimizer) -> None:
        """Raise ``ConfigError`` if other parameters are trained now than at the start."""
        now = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if [*map(id, now)] != [*map(id, self.parameters)] or any(
            self.parameters[n].dtype is not form.dtype for n, form in self._forms.items()
        ):
            raise ConfigError(
                f"the {len(self.parameters)} parameters that were trained at the start must be "
                f"trained throughout the block, but there are {len(now)} now, or others; end the "
                f"block, and begin another one after parameters were frozen, unfrozen, added or "
                f"replaced"
            )

    def parts(self, flats: Sequence[Tensor], server: int) -> list[Tensor]:
        """Return a server's parts of whole blocks."""
        return [flat[slice_bounds(len(flat), self._num_servers, server)] for flat in flats]

    def new_parts(self, server: int) -> list[Tensor]:
        """Allocate tensors of zeros of the size of a server's parts."""
        parts = self.parts([block.packed.flat for block in self.blocks], server)
        return [torch.zeros_like(part, device="cpu") for part in parts]

    def ranges(self, server: int) -> Iterator[ParameterRange]:
        """Yield the range of each parameter that a server stores."""
        for number, block in enumerate(self.blocks):
            own = slice_bounds(len(block.packed.flat), self._num_servers, server)
            for member, begin in zip(block.numbers, block.packed.offsets, strict=True):
                end = begin + self.parameters[member].numel()
                first, last = max(begin, own.start), min(end, own.stop)
                if first < last:
                    is_scalar = not self.parameters[member].dim()
                    inside, place = (
                        first - start if is_scalar else slice(first - start, last - start)
                        for start in (begin, own.start)
                    )
                    yield ParameterRange(member, self._groups[member], inside, number, place)

    @torch.no_grad()
    def fill(self, flats: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        """Copy one tensor for each parameter into whole blocks; None becomes zeros."""
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
        """Yield each parameter's number, and its view of the blocks, in its shape."""
        for block, flat in zip(self.blocks, flats, strict=True):
            yield from zip(block.numbers, block.packed.places_in(flat), strict=True)

    def shaped(self, number: int, flat: Tensor) -> Tensor:
        """Return the first elements of a flat tensor in the shape of a parameter."""
        return flat.as_strided(self._forms[number].shape, self._forms[number].stride())

    def flattened(self, number: int, values: Tensor) -> Tensor:
        """Return a flat copy of a tensor of the shape of a parameter, in its memory order."""
        flat = torch.empty(self.parameters[number].numel(), dtype=values.dtype)
        self.shaped(number, flat).copy_(values)
        return flat


class WriteWatch:
    """Detects writes to parameters since the last call of ``note``."""

    def __init__(self, layout: ParameterLayout) -> None:
        self._layout = layout
        self._noted: list[tuple[int, int]] = []

    def note(self) -> None:
        """Record the current versions and addresses of the parameters."""
        self._noted = self._identities()

    def written(self) -> list[str]:
        """Return the names of parameters that were written or replaced since ``note``."""
        both = zip(self._layout.names, self._noted, self._identities(), strict=True)
        return [name for name, was, now in both if was != now]

    def _identities(self) -> list[tuple[int, int]]:
        return [(version_of(p), p.data_ptr()) for p in self._layout.parameters]


class Slots:
    """Buffers in node memory for the gradients in flight and the requested values of each rank.

    Ranks of one node read and write the slots of each other in place.

    Args:
        comm: all ranks.
        layout: layout of the blocks.
        mates: the ranks of this node.
        num_slots: per rank.

    Raises:
        NodeMemoryError: there is too little memory; on all ranks.
    """

    def __init__(
        self, comm: Communicator, layout: ParameterLayout, mates: Sequence[int], num_slots: int
    ) -> None:
        """Allocate the slots. Collective."""
        self._of_ranks: dict[int, list[Tensor]] = {comm.rank: []}
        for block in layout.blocks:
            numel = len(block.packed.flat)
            bucket = comm.new_bucket(num_slots * numel, block.packed.flat.dtype)
            shared = dict(zip(mates, bucket.peers, strict=True)) if bucket.peers else {}
            for rank, flat in (shared or {comm.rank: bucket.flat}).items():
                self._of_ranks.setdefault(rank, []).append(flat.view(num_slots, numel))

    def __contains__(self, rank: int) -> bool:
        """Return whether this rank can access the memory of another."""
        return rank in self._of_ranks

    def of(self, rank: int, slot: int) -> list[Tensor]:
        """Return the blocks in a slot of a rank whose memory is accessible here."""
        return [slots[slot] for slots in self._of_ranks[rank]]
