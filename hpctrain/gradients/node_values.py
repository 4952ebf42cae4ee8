"""Parameters and optimizer state that the ranks of a node have once, in node memory.

Every rank maps that memory twice. Steps store to the shared map, each rank to its own slices. The
program sees the private map: it shows what the steps store, and what the program itself stores to
it stays with its rank, as with replicas. That is found before the next step, compared between the
ranks and taken over, so that a change on all ranks acts once.
"""

from collections.abc import Iterator, Mapping, Sequence
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.bucket import slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.comm.ops import Combination, Op, combination
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Codec, Identity, TensorByTensor
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.elementwise import Part, PieceStep
from hpctrain.gradients.reduction import GradientBucket, Slot
from hpctrain.gradients.weight_sample import checksum_of, due, sample_of
from hpctrain.runtime import world

_STATE_BYTES = 2 << 20
"""Of state that a step works on at once: all that belongs to it stays in the last-level cache, and
torch, which takes 10 to 40 us for a step however little it does, is not called too often."""
_BLOCK_BYTES = 512 << 10  # of gradients that are summed and scaled while they stay in L2
_LOOK, _MOST_LOOKS = 1024, 4
"""How many pages are looked at together, and how often in a step: 0.3 ms at most."""
_HALVES = (torch.bfloat16, torch.float16)
_CUT = 64
"""Pieces begin at a multiple of so many elements of their parameter, as vectors do."""


class NodeTensor:
    """Values of one dtype that the node has once."""

    def __init__(self, node: SharedMemory, numel: int, dtype: torch.dtype) -> None:
        """Make them zeros. Collective over the node."""
        self._region, self._dtype = node.new_region(numel * dtype.itemsize), dtype
        self.shared = torch.frombuffer(self._region.shared, dtype=dtype, count=max(numel, 1))

    def shown(self, like: Tensor, first: int) -> Tensor:
        """Return the values from ``first`` on, private to this process, formed like a tensor."""
        if not like.numel():
            return torch.empty_like(like, dtype=self._dtype)
        place = self._dtype.itemsize * first
        flat = torch.frombuffer(
            self._region.private, dtype=self._dtype, offset=place, count=like.numel()
        )
        return flat.as_strided(like.shape, like.stride())

    @property
    def num_pages(self) -> int:
        """Pages of memory."""
        return len(self._region.private) // PAGESIZE

    def find_stores(self, first_page: int, num_pages: int) -> bool:
        """Say whether this process has stored to some pages of what it sees."""
        return self._region.find_stores(first_page, min(num_pages, self.num_pages - first_page))

    def forget_stores(self) -> None:
        """Drop what this process has stored to what it sees."""
        self._region.forget_stores()


MASTER = "master"
"""Name, in the state of a parameter of 16 bits, of its values before they were rounded."""


class Piece:
    """A part of one parameter that this rank updates."""

    __slots__ = ("bounds", "grad", "group", "number", "rounded", "state", "values")

    grad: Tensor  # the average, while its chunk is at work

    def __init__(
        self, number: int, bounds: slice, values: Tensor, rounded: Tensor, group: int
    ) -> None:
        self.number, self.bounds, self.group = number, bounds, group
        self.values, self.rounded = values, rounded  # what is stepped, and what the model has
        self.state: dict[str, Tensor] = {}
        """Where what the step keeps lies."""


def by_group(pieces: Sequence[Piece]) -> Mapping[int, list[Tensor]]:
    """Return what a step takes of each group of the optimizer."""
    found: dict[int, list[Tensor]] = {}
    for piece in pieces:
        found.setdefault(piece.group, []).append(piece.values)
    return found


class Chunk:
    """Pieces in a row that fit the cache, with the gradients of all ranks of the node."""

    __slots__ = ("blocks", "bounds", "groups", "parts", "pieces", "total")

    def __init__(
        self, pieces: Sequence[Piece], peers: Sequence[Tensor], scratch: Tensor, how: Combination
    ) -> None:
        self.pieces, self.groups = pieces, by_group(pieces)
        self.bounds = slice(pieces[0].bounds.start, pieces[-1].bounds.stop)
        self.parts = tuple(peer[self.bounds].view(how.lane) for peer in peers)
        first = self.bounds.start
        total = scratch[: self.bounds.stop - first]
        self.total = total.view(how.lane) if total.dtype is peers[0].dtype else total
        size = _BLOCK_BYTES // self.total.itemsize
        cut = [one.split(size) for one in (self.total, *self.parts)]
        self.blocks = [(out, parts) for out, *parts in zip(*cut, strict=True)]
        """Parts of ``total``, with what is summed there."""
        for piece in pieces:
            piece.grad = total[piece.bounds.start - first : piece.bounds.stop - first]
            piece.values.grad = piece.grad


class NodeBucket:
    """Parameters and state of one bucket of gradients."""

    def __init__(
        self, node: SharedMemory, gradients: GradientBucket, master_dtype: torch.dtype | None
    ) -> None:
        """Make room for the parameters. Collective over the node."""
        bucket = gradients.bucket
        self.slots: Sequence[Slot] = gradients.slots
        self.dtype, self.peers = bucket.flat.dtype, bucket.peers
        self.has_masters = master_dtype is not None and self.dtype in _HALVES
        self.step_dtype = master_dtype if master_dtype and self.has_masters else self.dtype
        self.how = combination(self.dtype, Op.SUM)
        self.num_elements = bucket.numel - len(self.slots)  # behind them come the marks
        start = gradients.memory[0]
        self.offsets = [
            (slot.view.data_ptr() - start) // self.dtype.itemsize if slot.view.numel() else 0
            for slot in self.slots
        ]
        self._node = node
        self.values = NodeTensor(node, self.num_elements, self.dtype)
        self.state: dict[str, NodeTensor] = {}
        self.parts: dict[str, Part] = {}
        self.shown: list[dict[str, Tensor]] = [{} for _ in self.slots]
        """What the program sees as state of each parameter."""
        self.names: list[Sequence[str]] = []  # of what a step leaves as state of each parameter
        self.chunks: list[Chunk] = []

    @property
    def chunk_numel(self) -> int:
        """How many elements a step takes at once."""
        num_parts = sum(part.has_elements for name, part in self.parts.items() if name != MASTER)
        return _STATE_BYTES // max(num_parts, 1) // self.step_dtype.itemsize

    def cut(self, groups: Sequence[int], scratch: Tensor) -> None:
        """Cut this rank's slice into chunks of pieces; each parameter is of a group."""
        node, limit = self._node, self.chunk_numel
        rounded = self.values.shared
        values = self.state[MASTER].shared if self.has_masters else rounded
        mine = slice_bounds(self.num_elements, node.local_size, node.local_rank)
        pieces: list[Piece] = []
        self.chunks = []
        for number in sorted(range(len(self.slots)), key=self.offsets.__getitem__):
            first, numel = self.offsets[number], self.slots[number].view.numel()
            low, high = (_cut_at(bound - first, numel) for bound in (mine.start, mine.stop))
            for at in range(low, high, limit):
                bounds = slice(first + at, first + min(at + limit, high))
                if pieces and bounds.stop - pieces[0].bounds.start > limit:
                    self.chunks.append(Chunk(pieces, self.peers, scratch, self.how))
                    pieces = []
                both = values[bounds], rounded[bounds]
                pieces.append(Piece(number, bounds, *both, groups[number]))
        if pieces:
            self.chunks.append(Chunk(pieces, self.peers, scratch, self.how))

    def make_room(self, parts: Mapping[str, Part]) -> None:
        """Make room for these parts of the optimizer's state. Collective over the node."""
        self.parts |= parts
        for name, part in parts.items():
            numel = self.num_elements if part.has_elements else len(self.slots)
            self.state[name] = NodeTensor(self._node, numel, part.dtype)

    def see(self, number: int, name: str) -> Tensor:
        """Return what the program sees of a part of one parameter's state."""
        like = self.slots[number].view
        if self.parts[name].has_elements:
            return self.state[name].shown(like, self.offsets[number])
        return self.state[name].shown(torch.empty(()), number)

    def keep(self, piece: Piece, made: dict[str, Any]) -> None:
        """Let the state that a step has made of a piece lie where it belongs."""
        for name, value in made.items():
            place = piece.state.get(name)
            if value is place or value is None:
                continue
            if place is None:
                place = piece.state[name] = self._place(piece, name)
            place.copy_(value)
            made[name] = place

    def _place(self, piece: Piece, name: str) -> Tensor:
        shared, part = self.state[name].shared, self.parts[name]
        if part.has_elements:
            return shared[piece.bounds]
        if piece.bounds.start == self.offsets[piece.number]:  # who has the first one shows it
            return shared[piece.number]
        return torch.empty((), dtype=part.dtype)


class NodeValues:
    """All parameters that an optimizer steps, and their state, in the memory of the node."""

    def __init__(
        self,
        comm: Communicator,
        node: SharedMemory,
        rule: PieceStep,
        master_dtype: torch.dtype | None,
    ) -> None:
        self.buckets: list[NodeBucket] = []
        self._master_dtype = master_dtype
        self._comm, self._node, self._rule = comm, node, rule
        self._seen: list[tuple[Slot, int, int]] = []  # with address and version of the parameter
        self._versions: list[int] = []  # of the tensors of the optimizer's state
        self._kinds: list[tuple[object, ...]] = []  # of the groups, at the last ``adopt``
        self._pairs: list[tuple[Tensor, Tensor]] = []  # parameters, and what the node has of them

    def is_written(self, optimizer: Optimizer, step: int) -> bool:
        """Say whether this rank's program has changed parameters, state, or what a step keeps."""
        if self._kinds != self._rule.kinds or any(
            slot.parameter.data_ptr() != address or slot.parameter._version != version  # noqa: SLF001
            for slot, address, version in self._seen
        ):
            return True
        shown = [
            (s.parameter, e) for b in self.buckets for s, e in zip(b.slots, b.shown, strict=True)
        ]
        state = optimizer.state
        if any(e is not state.get(p) if e else state.get(p) for p, e in shown):
            return True
        if self._versions != [v._version for v in self._shown()]:  # noqa: SLF001
            return True
        return self._differs_silently(step)

    def _differs_silently(self, step: int) -> bool:
        """Say whether a sample was changed in a way that torch does not count, as by ``.data``."""
        looked = due(self._pairs, step)
        seen, shared = (sample_of([pair[i] for pair in looked], step) for i in (0, 1))
        return seen != shared

    def has_hidden_stores(self, step: int) -> bool:
        """Say whether pages that are looked at in this step hold stores that torch did not count.

        Few pages are looked at in every step, of many the next ones step by step: what is found
        there may have missed some steps.
        """
        pages = [
            (b.values, at) for b in self.buckets for at in range(0, b.values.num_pages, _LOOK)
        ]
        if len(pages) > _MOST_LOOKS:
            first = step * _MOST_LOOKS % len(pages)
            pages = (pages + pages)[first : first + _MOST_LOOKS]
        return any(values.find_stores(at, _LOOK) for values, at in pages)

    @property
    def step_dtypes(self) -> set[torch.dtype]:
        """Types in which averages are used."""
        return {bucket.step_dtype for bucket in self.buckets}

    @property
    def looks_at_all(self) -> bool:
        """Whether ``has_hidden_stores`` looks at all pages in every step."""
        return sum(-(-b.values.num_pages // _LOOK) for b in self.buckets) <= _MOST_LOOKS

    def _shown(self) -> Iterator[Tensor]:
        return (value for b in self.buckets for entry in b.shown for value in entry.values())

    @torch.no_grad()
    def lay_out(self, gradients: Sequence[GradientBucket]) -> None:
        """Make room for the parameters of these buckets. Collective.

        Those that are in none of them any more become this rank's own.
        """
        here = {slot.parameter for bucket in gradients for slot in bucket.slots}
        for slot, address, _ in self._seen:
            parameter = slot.parameter
            if parameter not in here and parameter.data_ptr() == address:
                parameter.data = parameter.detach().clone()
        made: list[NodeBucket] = []
        start_on(
            self._comm,
            lambda: made.extend(
                NodeBucket(self._node, one, self._master_dtype) for one in gradients
            ),
        ).wait()
        self.buckets, self._seen = made, []
        self._scratch = {b.step_dtype: torch.empty(0, dtype=b.step_dtype) for b in made}

    @torch.no_grad()
    def adopt(self, optimizer: Optimizer) -> None:
        """Take over parameters and state as the program sees them, if all ranks see the same.

        Collective; else all raise ``MismatchError``.
        """
        state, lines = optimizer.state, []
        for slot in (slot for bucket in self.buckets for slot in bucket.slots):
            entry = state.get(slot.parameter, {})
            sums = [f"{checksum_of(slot.parameter):08x}"]
            sums += [
                f"{k} {v.dtype} {checksum_of(v):08x}" for k, v in entry.items() if v is not None
            ]
            lines.append(f"{slot.name} {', '.join(sums)}")
        require_equal(
            self._comm,
            lines,
            "weights and optimizer state",
            "call hvd.broadcast_parameters(model.state_dict()) before the first step, and change "
            "weights and optimizer state on all ranks alike",
        )
        group_of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._kinds = self._rule.kinds
        self._rule.state.clear()
        for bucket in self.buckets:
            groups = [group_of[slot.parameter] for slot in bucket.slots]
            self._take_over(bucket, groups, state)
        start_on(self._comm, self._node.barrier).wait()
        for bucket in self.buckets:
            self._show(bucket, state)
        self._pairs = [
            (slot.parameter, bucket.values.shared[first : first + slot.view.numel()])
            for bucket in self.buckets
            for slot, first in zip(bucket.slots, bucket.offsets, strict=True)
            if slot.view.numel()
        ]
        self._note_versions()

    def _take_over(self, bucket: NodeBucket, groups: Sequence[int], state: Any) -> None:
        entries = [state.get(slot.parameter) or {} for slot in bucket.slots]
        masters = (
            {MASTER: Part(bucket.step_dtype, has_elements=True)} if bucket.has_masters else {}
        )
        parts = [self._rule.parts(group, bucket.step_dtype) | masters for group in groups]
        bucket.names = [list(one) for one in parts]
        wanted = {name: part for one in parts for name, part in one.items()}
        for slot, entry in zip(bucket.slots, entries, strict=True):
            for name, value in entry.items():
                if isinstance(value, Tensor) and not (bucket.has_masters and name in wanted):
                    default = Part(value.dtype, value.shape == slot.view.shape)
                    wanted[name] = Part(value.dtype, wanted.get(name, default).has_elements)
        missing = {k: part for k, part in wanted.items() if bucket.parts.get(k) != part}
        start_on(self._comm, bucket.make_room, missing).wait()
        if self._scratch[bucket.step_dtype].numel() < bucket.chunk_numel:
            empty = torch.empty(bucket.chunk_numel, dtype=bucket.step_dtype)
            self._scratch[bucket.step_dtype] = empty
        bucket.cut(groups, self._scratch[bucket.step_dtype])
        flats = [_flat(slot.parameter, slot.view) for slot in bucket.slots]
        for piece in (piece for chunk in bucket.chunks for piece in chunk.pieces):
            slot, entry = bucket.slots[piece.number], entries[piece.number]
            first = bucket.offsets[piece.number]
            own = slice(piece.bounds.start - first, piece.bounds.stop - first)
            made = {
                k: _flat(v, slot.view)[own] if bucket.parts[k].has_elements else v
                for k, v in entry.items()
                if v is not None
            }
            seen, master = flats[piece.number][own], made.pop(MASTER, None)
            if bucket.has_masters and master is not None:  # unless the program has written since
                kept = torch.where(master.to(seen.dtype) == seen, master, seen.to(master.dtype))
                piece.values.copy_(kept)
            else:
                piece.values.copy_(seen)
            piece.rounded.copy_(seen)
            bucket.keep(piece, made)
            if made:
                self._rule.state[piece.values] = made

    def _show(self, bucket: NodeBucket, state: Any) -> None:
        bucket.values.forget_stores()
        for tensor in bucket.state.values():
            tensor.forget_stores()
        for number, slot in enumerate(bucket.slots):
            slot.parameter.data = bucket.values.shown(slot.view, bucket.offsets[number])
            slot.layout = slot.parameter.stride()
            bucket.shown[number] = {}
            if entry := state.get(slot.parameter):
                names = [name for name, value in entry.items() if value is not None]
                state[slot.parameter] = entry = {name: bucket.see(number, name) for name in names}
                bucket.shown[number] = entry

    def show_new_state(self, optimizer: Optimizer, present: Sequence[Sequence[bool]]) -> None:
        """Let the program see the state of parameters that were stepped for the first time."""
        made: dict[Tensor, dict[str, Tensor]] = {}
        for bucket, are_present in zip(self.buckets, present, strict=True):
            for number, slot in enumerate(bucket.slots):
                entry, names = bucket.shown[number], bucket.names[number]
                if are_present[number] and len(entry) < len(names):
                    entry = entry | {n: bucket.see(number, n) for n in names if n not in entry}
                    made[slot.parameter] = bucket.shown[number] = entry
        for parameter in (p for g in optimizer.param_groups for p in g["params"] if made):
            if parameter in made:  # in the order in which the optimizer would make them
                optimizer.state[parameter] = made[parameter]
        changed = [
            slot.parameter
            for bucket, are in zip(self.buckets, present, strict=True)
            for slot, is_present in zip(bucket.slots, are, strict=True)
            if is_present
        ]
        torch.autograd.graph.increment_version(
            changed
        )  # as a step does: graphs of before are stale
        self._note_versions()

    def _note_versions(self) -> None:
        """Remember how the program's tensors look when nobody has written to them."""
        self._seen = [
            (slot, slot.parameter.data_ptr(), slot.parameter._version)  # noqa: SLF001
            for bucket in self.buckets
            for slot in bucket.slots
        ]
        self._versions = [value._version for value in self._shown()]  # noqa: SLF001


def require_no_masters(master_dtype: torch.dtype | None) -> None:
    """Raise ``ConfigError`` if somebody wants masters where nobody keeps them."""
    if master_dtype is not None:
        raise ConfigError(
            'master_dtype is for shard="node" and several ranks on a node, which keeps masters '
            f"once, got {master_dtype}; start more ranks, or leave it out"
        )


def is_shared(shard: str | None, comm: Communicator, codec: Codec) -> bool:
    """Say whether ranks share parameters; not where each has a node to itself."""
    if shard is None:
        return False
    levels = comm.levels
    if levels is None:
        if all(len(ranks) == 1 for ranks in world.current().topology.nodes):
            return False
        raise ConfigError(
            'shard="node" needs memory that the ranks of a node share, and there is none here; '
            "see hpctrain doctor and HPCTRAIN_SHARED_MEMORY, or leave shard out"
        )
    is_plain = isinstance(codec, Identity)  # others do nothing inside a node
    if isinstance(codec, TensorByTensor) or (levels.num_rails and not is_plain):
        raise ConfigError(
            'shard="node" sends gradients between nodes as they are, got a compression; leave one '
            "of them out"
        )
    return True


def _cut_at(bound: int, numel: int) -> int:
    return min(max(-(-bound // _CUT) * _CUT, 0), numel)


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements in the order in which those of ``like`` lie in memory."""
    tensor = tensor.detach()
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
