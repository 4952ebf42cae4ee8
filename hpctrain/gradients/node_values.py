"""Parameters and optimizer state that the ranks of a node share, in node memory.

Every rank maps this memory twice: shared and private. Steps write to the shared map, each rank to
its own slices. The program uses the private map, which contains the values of the last step. A
store by the program stays private to its rank, as with replicas; stores are detected before the
next step, compared between the ranks and copied to the shared map, so that a change on all ranks
is applied once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.shared_memory import SharedMemory
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Codec, Identity, TensorByTensor
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import increment_version, version_of
from hpctrain.gradients.elementwise import PieceStep, StateSpec
from hpctrain.gradients.gradient_bucket import GradientBucket, Slot
from hpctrain.gradients.node_bucket import MASTER, Chunk, NodeBucket, ParameterPiece
from hpctrain.gradients.weight_sample import checksum_of, due, sample_of
from hpctrain.runtime import world

_LOOK, _MOST_LOOKS = 1024, 4
"""Pages per check, and largest number of checks per step; all checks take at most 0.3 ms."""


class NodeValues:
    """Stores all parameters of an optimizer, and their state, in node memory.

    Args:
        comm: all ranks.
        node: memory that the ranks of this node share.
        rule: applies the optimizer's step to slices of parameters.
        master_dtype: dtype of the master copies of 16-bit parameters; None for no copies.
    """

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
        self._seen: list[tuple[Slot, int, int]] = []  # slot, address and version of its parameter
        self._versions: list[int] = []  # versions of the tensors of the optimizer state
        self._kinds: list[tuple[object, ...]] = []  # ``PieceStep.kinds`` at the last ``adopt``
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Parameters, and their values in node memory."""

    def is_written(self, optimizer: Optimizer, step: int) -> bool:
        """Return whether the program has changed parameters, state or settings on this rank."""
        if self._kinds != self._rule.kinds or any(
            slot.parameter.data_ptr() != address or version_of(slot.parameter) != version
            for slot, address, version in self._seen
        ):
            return True
        shown = [
            (s.parameter, e) for b in self.buckets for s, e in zip(b.slots, b.shown, strict=True)
        ]
        state = optimizer.state
        if any(e is not state.get(p) if e else state.get(p) for p, e in shown):
            return True
        if self._versions != [version_of(v) for v in self._shown()]:
            return True
        # A comparison of samples detects writes that version counters do not count.
        looked = due(self._pairs, step)
        seen, shared = (sample_of([pair[i] for pair in looked], step) for i in (0, 1))
        return seen != shared

    def has_hidden_stores(self, step: int) -> bool:
        """Return whether the program has written to the pages that this step checks.

        A step checks at most 4 blocks of 1024 pages. With more blocks, consecutive steps check
        different blocks, so a store may be detected some steps late.
        """
        pages = [
            (b.values, at) for b in self.buckets for at in range(0, b.values.num_pages, _LOOK)
        ]
        if len(pages) > _MOST_LOOKS:
            first = step * _MOST_LOOKS % len(pages)
            pages = (pages + pages)[first : first + _MOST_LOOKS]
        return any(values.find_stores(at, _LOOK) for values, at in pages)

    @property
    def looks_at_all(self) -> bool:
        """Whether ``has_hidden_stores`` checks all pages in every step."""
        return sum(-(-b.values.num_pages // _LOOK) for b in self.buckets) <= _MOST_LOOKS

    def _shown(self) -> Iterator[Tensor]:
        return (value for b in self.buckets for entry in b.shown for value in entry.values())

    @torch.no_grad()
    def lay_out(self, gradients: Sequence[GradientBucket]) -> None:
        """Allocate node memory for the parameters of the buckets ``gradients``. Collective.

        Parameters that are no longer in a bucket become private to this rank.
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

    @torch.no_grad()
    def adopt(self, optimizer: Optimizer) -> None:
        """Copy parameters and optimizer state from the program to node memory. Collective.

        Raises:
            MismatchError: the values differ between ranks; raised on all ranks.
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
            "weights and optimizer state identically on all ranks",
        )
        group_of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._kinds = self._rule.kinds
        self._rule.state.clear()
        owned = self._owned() if self._rule.takes_tensors else None
        cut: list[list[list[ParameterPiece]]] = []
        for bucket in self.buckets:
            groups = [group_of[slot.parameter] for slot in bucket.slots]
            start_on(self._comm, bucket.make_room, self._parts(bucket, groups, state)).wait()
            cut.append(bucket.cut(groups, owned))
        scratch: dict[torch.dtype, Tensor] = {}  # memory for the sum of a chunk
        for bucket, rows in zip(self.buckets, cut, strict=True):
            numel = max((row[-1].bounds.stop - row[0].bounds.start for row in rows), default=0)
            dtype = bucket.step_dtype
            if dtype not in scratch or scratch[dtype].numel() < numel:
                scratch[dtype] = torch.empty(numel, dtype=dtype)
        for bucket, rows in zip(self.buckets, cut, strict=True):
            flat = scratch[bucket.step_dtype]
            bucket.chunks = [Chunk(row, bucket.peers, flat, bucket.how) for row in rows]
            self._take_over(bucket, state)
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

    def _owned(self) -> set[Slot]:
        """Return the slots whose parameters this rank updates.

        Slots are assigned by decreasing size, each to the rank with the fewest elements so far.
        """
        loads, mine = [0] * self._node.local_size, set[Slot]()
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        for slot in sorted(slots, key=lambda slot: -slot.view.numel()):
            owner = loads.index(min(loads))
            loads[owner] += slot.view.numel()
            if owner == self._node.local_rank:
                mine.add(slot)
        return mine

    def _parts(
        self, bucket: NodeBucket, groups: Sequence[int], state: Any
    ) -> list[dict[str, StateSpec]]:
        """Return dtype and shape of the state tensors that each parameter has or will get."""
        parts, whole = list[dict[str, StateSpec]](), self._rule.takes_tensors
        dtypes: dict[str, torch.dtype] = {}  # existing state takes precedence
        for slot, group in zip(bucket.slots, groups, strict=True):
            shape = slot.view.shape
            parts.append(dict(self._rule.parts(group, bucket.step_dtype, shape)))
            if bucket.has_masters:
                parts[-1][MASTER] = StateSpec(bucket.step_dtype, None)
            dtypes |= {name: part.dtype for name, part in parts[-1].items()}
        for slot, of in zip(bucket.slots, parts, strict=True):
            for name, value in (state.get(slot.parameter) or {}).items():
                if not isinstance(value, Tensor):
                    continue
                form = tuple(value.shape) if whole or value.shape != slot.view.shape else None
                known = of.get(name, StateSpec(value.dtype, form))
                if known.shape is None and value.shape != slot.view.shape:
                    raise ConfigError(
                        f"{name} in the optimizer state of {slot.name} must have the shape of the "
                        f"parameter, {tuple(slot.view.shape)}, got {tuple(value.shape)}; load the "
                        f"state of this model"
                    )
                if not (bucket.has_masters and name in dtypes):
                    dtypes[name] = value.dtype
                of[name] = known if known.shape is None else known._replace(shape=form)
        return [{n: part._replace(dtype=dtypes[n]) for n, part in of.items()} for of in parts]

    def _take_over(self, bucket: NodeBucket, state: Any) -> None:
        """Copy values and state of this rank's pieces from the program to node memory."""
        flats = [_flat(slot.parameter, slot.view) for slot in bucket.slots]
        for piece in (piece for chunk in bucket.chunks for piece in chunk.pieces):
            slot, parts = bucket.slots[piece.number], bucket.parts[piece.number]
            made = {
                k: piece.of(_flat(v, slot.view)) if parts[k].shape is None else v
                for k, v in (state.get(slot.parameter) or {}).items()
                if v is not None
            }
            seen, master = piece.of(flats[piece.number]), made.pop(MASTER, None)
            # The master copy remains valid where the program has not written.
            if bucket.has_masters and master is not None:
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
                state[slot.parameter] = entry = {
                    name: bucket.private_view(number, name) for name in names
                }
                bucket.shown[number] = entry

    def show_new_state(self, optimizer: Optimizer, present: Sequence[Sequence[bool]]) -> None:
        """Add to the optimizer the state tensors that this step has created."""
        made: dict[Tensor, dict[str, Tensor]] = {}
        for bucket, are_present in zip(self.buckets, present, strict=True):
            for number, slot in enumerate(bucket.slots):
                entry, names = bucket.shown[number], bucket.parts[number]
                if are_present[number] and len(entry) < len(names):
                    entry = entry | {
                        n: bucket.private_view(number, n) for n in names if n not in entry
                    }
                    made[slot.parameter] = bucket.shown[number] = entry
        for parameter in (p for g in optimizer.param_groups for p in g["params"] if made):
            if parameter in made:  # in the order in which the optimizer creates state
                optimizer.state[parameter] = made[parameter]
        changed = [
            slot.parameter
            for bucket, are in zip(self.buckets, present, strict=True)
            for slot, is_present in zip(bucket.slots, are, strict=True)
            if is_present
        ]
        # As after an ordinary step, earlier graphs must not use the changed parameters.
        increment_version(changed)
        self._note_versions()

    def _note_versions(self) -> None:
        """Record the version counters of parameters and state, to detect later changes."""
        self._seen = [
            (slot, slot.parameter.data_ptr(), version_of(slot.parameter))
            for bucket in self.buckets
            for slot in bucket.slots
        ]
        self._versions = [version_of(value) for value in self._shown()]
        for bucket in self.buckets:
            bucket.values.end_step()


def require_no_masters(master_dtype: torch.dtype | None) -> None:
    """Raise ``ConfigError`` if master copies are requested without shared memory."""
    if master_dtype is not None:
        raise ConfigError(
            f'master_dtype must be used with shard="node" on nodes with shared memory, but one of '
            f"the two is missing, got master_dtype={master_dtype}; see hpctrain doctor and "
            f"HPCTRAIN_SHARED_MEMORY, or leave master_dtype out"
        )


def is_shared(shard: str | None, comm: Communicator, codec: Codec) -> bool:
    """Return whether the ranks of a node share parameters; False with one rank per node.

    Raises:
        ConfigError: there is no shared memory, or gradients are compressed.
    """
    if shard is None:
        return False
    if comm.node is None:
        if all(len(ranks) == 1 for ranks in world.current().topology.nodes):
            return False
        raise ConfigError(
            'shard="node" can only be used if the ranks of a node share memory, but these do '
            "not; see hpctrain doctor and HPCTRAIN_SHARED_MEMORY, or leave shard out"
        )
    is_plain = isinstance(codec, Identity)  # inside a node, gradients are not compressed
    if isinstance(codec, TensorByTensor) or (comm.num_rails and not is_plain):
        raise ConfigError(
            f'gradients must not be compressed with shard="node", got {type(codec).__name__}; '
            f"leave compression or shard out"
        )
    return True


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of ``tensor`` as a 1-D tensor, in the memory order of ``like``."""
    tensor = tensor.detach()
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
