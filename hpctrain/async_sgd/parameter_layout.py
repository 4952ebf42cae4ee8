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
"""Index of a rank's last slot, to which servers write the values that the rank has requested."""


class ParameterRange(NamedTuple):
    """Elements of one parameter that one server stores."""

    number: int  # index of the parameter
    group: int  # index of the parameter group of the optimizer
    # For a scalar, an integer: a step on a scalar rounds differently than on a slice of length 1.
    inside: slice | int  # elements of the parameter
    block: int  # index of the block
    place: slice | int  # the same elements in the server's part of the block


class DtypeBlock(NamedTuple):
    """Concatenation of all parameters of one dtype.

    Each parameter begins at a multiple of 64 elements, in its memory order, and blocks are divided
    at such multiples only: kernels process 64 elements at a time, so a step on the parts rounds
    like a step on the whole parameter.
    """

    numbers: list[int]  # indices of the parameters in this block
    packed: PackedTensors  # positions of the parameters, in a buffer without memory


class ParameterLayout:
    """Layout of the trained parameters of an optimizer in blocks, divided evenly among servers.

    Args:
        optimizer: optimizer whose trained parameters the layout contains.
        names: names of parameters, by ``id``.
        num_servers: number of servers, each of which stores a part of each block.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], num_servers: int) -> None:
        self._num_servers = num_servers
        groups = enumerate(optimizer.param_groups)
        found = [(g, p) for g, group in groups for p in group["params"] if p.requires_grad]
        self._groups = [group for group, _ in found]
        self.parameters: list[Tensor] = [p for _, p in found]
        self.names = [names[id(p)] for p in self.parameters]
        self._forms: dict[int, Tensor] = {}  # by index: shape and strides, as a meta tensor
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
        """Return name, group, shape and dtype of each parameter, to compare between ranks."""
        every = zip(self.names, self._groups, self.parameters, strict=True)
        return [f"{name} {(group, tuple(p.shape), str(p.dtype))}" for name, group, p in every]

    def require_same(self, optimizer: Optimizer) -> None:
        """Raise ``ConfigError`` if the trained parameters of ``optimizer`` have changed."""
        now = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if [*map(id, now)] != [*map(id, self.parameters)] or any(
            self.parameters[n].dtype is not form.dtype for n, form in self._forms.items()
        ):
            raise ConfigError(
                f"the trained parameters of the optimizer must not change inside the block, but "
                f"the {len(self.parameters)} parameters at the start differ from the {len(now)} "
                f"now; end the block before parameters are frozen, unfrozen, added, replaced or "
                f"converted, and begin another block afterwards"
            )

    def parts(self, flats: Sequence[Tensor], server: int) -> list[Tensor]:
        """Return views of the parts of ``flats`` that ``server`` stores."""
        return [flat[slice_bounds(len(flat), self._num_servers, server)] for flat in flats]

    def new_parts(self, server: int) -> list[Tensor]:
        """Return zeros with the sizes of the parts that ``server`` stores."""
        parts = self.parts([block.packed.flat for block in self.blocks], server)
        return [torch.zeros_like(part, device="cpu") for part in parts]

    def ranges(self, server: int) -> Iterator[ParameterRange]:
        """Yield the ranges of parameters that ``server`` stores."""
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
        """Copy ``tensors``, one per parameter, into the blocks ``flats``; None becomes zeros."""
        for number, place in self._places(flats):
            tensor = tensors[number]
            if tensor is None:
                place.zero_()
            else:
                place.copy_(tensor.to_dense() if tensor.is_sparse else tensor)

    @torch.no_grad()
    def take(self, flats: Sequence[Tensor]) -> None:
        """Copy the values in the blocks ``flats`` into the parameters."""
        for number, place in self._places(flats):
            self.parameters[number].copy_(place)

    def _places(self, flats: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each parameter, and its part of ``flats`` as a view in its shape."""
        for block, flat in zip(self.blocks, flats, strict=True):
            yield from zip(block.numbers, block.packed.places_in(flat), strict=True)

    def shaped(self, number: int, flat: Tensor) -> Tensor:
        """Return a view of ``flat`` in the shape and memory order of parameter ``number``."""
        return flat.as_strided(self._forms[number].shape, self._forms[number].stride())

    def flattened(self, number: int, values: Tensor) -> Tensor:
        """Return a flat copy of ``values`` in the memory order of parameter ``number``."""
        flat = torch.empty(self.parameters[number].numel(), dtype=values.dtype)
        self.shaped(number, flat).copy_(values)
        return flat


class WriteWatch:
    """Detects writes to parameters since the last call of ``note``."""

    def __init__(self, layout: ParameterLayout) -> None:
        self._layout = layout
        self._noted: list[tuple[int, int]] = []

    def note(self) -> None:
        """Record the current version counters and addresses of the parameters."""
        self._noted = self._identities()

    def written(self) -> list[str]:
        """Return the names of the parameters that were written or replaced after ``note``."""
        both = zip(self._layout.names, self._noted, self._identities(), strict=True)
        return [name for name, was, now in both if was != now]

    def _identities(self) -> list[tuple[int, int]]:
        return [(version_of(p), p.data_ptr()) for p in self._layout.parameters]


class Slots:
    """Buffers in node memory for the gradients in flight and the requested values of each rank.

    The ranks of a node access each other's slots in place. The constructor is collective.

    Args:
        comm: all ranks.
        layout: layout of the blocks.
        mates: the ranks of this node.
        num_slots: slots per rank.

    Raises:
        NodeMemoryError: memory is not sufficient; on all ranks.
    """

    def __init__(
        self, comm: Communicator, layout: ParameterLayout, mates: Sequence[int], num_slots: int
    ) -> None:
        self._of_ranks: dict[int, list[Tensor]] = {comm.rank: []}
        for block in layout.blocks:
            numel = len(block.packed.flat)
            bucket = comm.new_bucket(num_slots * numel, block.packed.flat.dtype)
            shared = dict(zip(mates, bucket.peers, strict=True)) if bucket.peers else {}
            for rank, flat in (shared or {comm.rank: bucket.flat}).items():
                self._of_ranks.setdefault(rank, []).append(flat.view(num_slots, numel))

    def __contains__(self, rank: int) -> bool:
        """Return whether this rank can access the slots of ``rank``."""
        return rank in self._of_ranks

    def of(self, rank: int, slot: int) -> list[Tensor]:
        """Return the blocks in ``slot`` of ``rank``, which is on this node."""
        return [slots[slot] for slots in self._of_ranks[rank]]
