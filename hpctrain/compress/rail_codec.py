"""Base of lossy codecs, which encode only data sent between nodes.

    part = comm.reduce_node(bucket, scale=scale)     # exact, inside the node
    codec.reduce_(share, values, comm.internode)     # lossy, between nodes
    comm.publish(bucket)                             # bitwise equal on every rank of the node

Each rank of a node sends a part of the bucket to the other nodes. ``values`` are the elements of
this part that the codec encodes, and ``share`` stores their positions in the bucket and the
codec's state for them. The other elements of the part are summed exactly, for example the marks at
the end of the bucket, which show for each tensor whether a rank has a gradient. Without node
memory each rank is a separate node.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.bucket import Bucket, slice_bounds
from hpctrain.comm.communicator import Communicator, Internode
from hpctrain.comm.operation_result import Work
from hpctrain.comm.tensor_bucket import PackedTensors
from hpctrain.comm.threaded import start_on
from hpctrain.core.errors import ConfigError


class CodedTensor(NamedTuple):
    """Position in a bucket of a tensor, or of the part of a tensor that this rank encodes."""

    number: int  # index of the tensor in its bucket
    start: int  # index of the first element in the bucket
    numel: int  # number of elements
    row: int  # elements per row of the tensor: all weights of one output
    offset: int = 0  # elements of the tensor before this part
    first: int = 0  # index of the first element among all encoded elements

    @property
    def stop(self) -> int:
        """Index in the bucket after the last element."""
        return self.start + self.numel

    @property
    def end(self) -> int:
        """Index among the encoded elements after the last element."""
        return self.first + self.numel


class CodedShare:
    """Elements of one bucket that this rank encodes, with their state.

    Args:
        slots: all tensors of the bucket.
        places: parts of tensors that this rank encodes.
        exact: spans of the bucket that are summed exactly: elements of tensors, then marks.
        num_exact: number of elements of tensors in ``exact``.
        dtype: dtype of the bucket.
    """

    def __init__(
        self,
        slots: Sequence[CodedTensor],
        places: Sequence[CodedTensor],
        exact: Sequence[slice],
        num_exact: int,
        dtype: torch.dtype,
    ) -> None:
        self.slots, self.places = slots, places
        self.exact, self.num_exact = exact, num_exact
        self.spans = _joined(places)
        self.dtype = dtype if dtype is torch.float64 else torch.float32
        """Dtype of the computation: float64 or float32."""
        self.numel = _length(self.spans)
        self.bucket = 0
        """Index of the bucket, from 0, in the order of the calls of ``prepare``."""
        self.memory: dict[str, Tensor] = {}
        """State for the next step, by name."""
        self.num_steps = 0

    def remembered(self, name: str) -> Tensor:
        """Return state ``name``, one element per encoded value; zeros at the first call."""
        if name not in self.memory:
            self.memory[name] = torch.zeros(self.numel, dtype=self.dtype)
        return self.memory[name]

    def forget_what_is_not_finite(self, result: Tensor) -> None:
        """Set non-finite elements of the state to zero if ``result`` is not finite."""
        if self.memory and not math.isfinite(result.sum().item()):
            for value in self.memory.values():
                value.nan_to_num_(0.0, 0.0, 0.0)


_UNSENT = ("error", "late error", "sum")
"""Names of the state with unsent values."""


class _Prepared(NamedTuple):
    """Prepared bucket, with the share of this rank and the union of the node's shares."""

    bucket: Bucket
    share: CodedShare
    whole: CodedShare  # the same on all ranks
    marks: Tensor


class RailCodec:
    """Base class of lossy codecs; subclasses implement ``reduce_`` and ``bytes_of``."""

    keeps_unsent = False
    """Whether shares store unsent values for the next step."""
    unsent = "error"
    """Name of the state to which loaded unsent values are added."""
    takes_tensors = False
    """Whether each rail sends whole tensors, instead of a slice of each bucket."""

    def __init__(self) -> None:
        self._prepared: dict[int, _Prepared] = {}
        self._before: list[CodedShare] = []
        self.rail_s = 0.0

    def reduce_(self, share: CodedShare, values: Tensor, link: Internode) -> None:
        """Replace ``values`` by the codec's approximation of their sum over ``link``.

        Collective over ``link``. Called once per share and step.

        Args:
            share: description and state of the values; the same object in every step.
            values: flat; the same spans of the bucket on all ranks of ``link``.
            link: ranks to sum over, one per node.
        """
        raise NotImplementedError

    def bytes_of(self, share: CodedShare) -> int:
        """Return the encoded size of the values of ``share`` in one message, in bytes."""
        raise NotImplementedError

    def after_exact(self, share: CodedShare, values: Tensor) -> None:
        """Process the sums of values that are not encoded. No-op unless overridden."""

    def warning(self, optimizer: Optimizer) -> str:  # noqa: ARG002 - for subclasses
        """Return a warning if training with ``optimizer`` may not converge; see ``Codec``."""
        return ""

    def is_exact(self, tensor: Tensor) -> bool:  # noqa: ARG002 - for subclasses
        """Return True if ``tensor`` is summed exactly. Marks are always summed exactly."""
        return False

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Divide the bucket into encoded and exact spans; see ``Codec``."""
        dtype = bucket.flat.dtype
        if not (dtype.is_floating_point and comm.num_rails):
            return
        *tensors, marks = parts
        slots = [_slot(bucket, number, each) for number, each in enumerate(tensors)]
        coded = [
            slot for slot, each in zip(slots, tensors, strict=True) if not self.is_exact(each)
        ]
        own, mine, takes_exact = slice(0, bucket.numel), coded, True
        rail = 0 if comm.node is None else comm.node.local_rank
        if comm.internode is None:
            mine, takes_exact = [], False
        elif self.takes_tensors:
            mine, takes_exact = _whole(coded, comm.num_rails, rail), rail == 0
        else:
            own = slice_bounds(bucket.numel, comm.num_rails, rail)
        exact = _spans_between(coded, own) if takes_exact else []
        first_mark = bucket.numel - marks.numel()
        num_marks = max(own.stop - max(own.start, first_mark), 0) if takes_exact else 0
        num_exact = _length(exact) - num_marks
        share = CodedShare(slots, _places(mine, own), exact, num_exact, dtype)
        share.bucket = len(self._prepared)
        before = self._before.pop(0) if self._before else None
        if before is not None and before.slots == slots and before.numel == share.numel:
            share.memory, share.num_steps = before.memory, before.num_steps
        everything = slice(0, bucket.numel)
        all_exact = _spans_between(coded, everything)
        whole = CodedShare(slots, _places(coded, everything), all_exact, 0, dtype)
        self._prepared[id(bucket)] = _Prepared(bucket, share, whole, marks)

    def forget(self) -> None:
        """Discard all shares; ``prepare`` restores the state of a share with the same tensors."""
        self._before = self._shares or self._before
        self._prepared.clear()

    @property
    def _shares(self) -> list[CodedShare]:
        return [each.share for each in self._prepared.values()]

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the compressed size for one node in bytes; see ``Codec``."""
        prepared = self._prepared.get(id(bucket))
        if prepared is None:
            return bucket.flat.nbytes
        _, share, whole, _ = prepared
        whole.num_steps = share.num_steps
        return self.bytes_of(whole) + _length(whole.exact) * bucket.flat.itemsize

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum exactly inside the node, and encoded between nodes; see ``Codec``."""
        prepared = self._prepared.get(id(bucket))
        if prepared is None:
            return comm.allreduce_(bucket, scale=scale)
        return start_on(comm, self._step, prepared, comm, scale)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of each share, by index of its bucket."""
        return {
            str(number): {
                "steps": share.num_steps,
                "numel": share.numel,
                "memory": {name: value.clone() for name, value in share.memory.items()},
            }
            for number, share in enumerate(self._shares)
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return True if ``state`` was saved for the same buckets; see ``Codec``."""
        shares = self._shares
        return len(state) == len(shares) and all(
            kept["numel"] == share.numel
            for kept, share in zip(state.values(), shares, strict=True)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of ``state_dict`` for the same buckets; see ``Codec``."""
        if not self.fits(state):
            raise ConfigError(
                f"the state of a codec must be of the same buckets, but the {len(state)} saved "
                f"buckets do not match the {len(self._shares)} buckets of the codec; keep ranks, "
                f"parameters and bucket size"
            )
        for kept, share in zip(state.values(), self._shares, strict=True):
            share.num_steps = kept["steps"]
            share.memory = {name: value.clone() for name, value in kept["memory"].items()}

    def shared_state(self, comm: Communicator) -> dict[str, Any]:
        """Return the unsent values, summed over nodes, by tensor; see ``Codec``."""
        sums: list[Tensor] = []
        for bucket, share, *_ in self._prepared.values() if self.keeps_unsent else ():
            waiting = torch.zeros(bucket.numel, dtype=share.dtype)
            for value in (share.memory[name] for name in _UNSENT if name in share.memory):
                for place in share.places:
                    waiting[place.start : place.stop] += value[place.first : place.end]
            comm.allreduce_(waiting).wait()
            sums += [waiting[slot.start : slot.stop].clone() for slot in share.slots]
        steps = max((share.num_steps for share in self._shares), default=0)
        return {"steps": steps, "unsent": sums}

    def load_shared_state(self, state: Mapping[str, Any], comm: Communicator) -> None:
        """Distribute the unsent values over the current nodes; see ``Codec``."""
        for share in self._shares:
            share.num_steps, share.memory = state["steps"], {}
        slots = [slot for share in self._shares for slot in share.slots]
        if [slot.numel for slot in slots] != [each.numel() for each in state["unsent"]]:
            return  # a state that was saved on one node has no unsent values
        unsent = iter(state["unsent"])
        num_nodes = comm.size if comm.internode is None else comm.internode.size
        for share in self._shares:
            whole = {slot.number: next(unsent) for slot in share.slots}
            for place in share.places:
                mine = whole[place.number][place.offset : place.offset + place.numel]
                if mine.any():
                    share.remembered(self.unsent)[place.first : place.end] = mine / num_nodes

    def _step(self, prepared: _Prepared, comm: Communicator, scale: float | None) -> None:
        bucket, node, link = prepared.bucket, comm.node, comm.internode
        comm.reduce_node(bucket, scale=scale)
        if node is not None and self.takes_tensors:  # tensors span the slices of several ranks
            node.barrier()
        if link is not None:
            self._over(prepared.share, bucket.peers[0] if bucket.peers else bucket.flat, link)
        if node is not None and self.takes_tensors:
            node.barrier()
        comm.publish(bucket)
        if link is not None:
            self._keep_unused(prepared, link.size)

    def _keep_unused(self, prepared: _Prepared, num_nodes: int) -> None:
        """Add to the unsent values the results for tensors that have no gradient on any rank."""
        bucket, share, _, marks = prepared
        unsent = share.memory.get(self.unsent)
        if unsent is None or not len(marks) or marks.all():
            return
        for place in share.places:
            if not marks[place.number]:
                received = bucket.flat[place.start : place.stop].nan_to_num(0.0, 0.0, 0.0)
                unsent[place.first : place.end].add_(received, alpha=1 / num_nodes)

    def _over(self, share: CodedShare, flat: Tensor, link: Internode) -> None:
        """Reduce this rank's share of a bucket over ``link``. Collective over ``link``."""
        start = time.perf_counter()
        if share.exact:
            with gathered(flat, share.exact, flat.dtype) as exact:
                link.allreduce_(exact).wait()
                self.after_exact(share, exact[: share.num_exact])
                share.forget_what_is_not_finite(exact)
        if share.numel:
            with gathered(flat, share.spans, share.dtype) as values:
                self.reduce_(share, values, link)
                share.forget_what_is_not_finite(values)
        share.num_steps += 1
        self.rail_s += time.perf_counter() - start


@contextmanager
def gathered(bucket: Tensor, spans: Sequence[slice], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the elements of ``spans`` as one flat tensor; copy changes back at the end."""
    views = [bucket[span] for span in spans]
    if len(views) == 1 and bucket.dtype is dtype:
        yield views[0]
        return
    packed = PackedTensors.copied(views, dtype)
    yield packed.flat
    packed.unpack(views)


def exchanged(link: Internode, outgoing: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
    """Send ``outgoing[r]`` to rank r; return ``numels[r]`` elements received from each rank."""
    return link.start_alltoall(outgoing, numels)()


def _slot(bucket: Bucket, number: int, tensor: Tensor) -> CodedTensor:
    """Return the position of a tensor in its bucket, with the length of its rows in memory."""
    start = tensor.storage_offset() - bucket.flat.storage_offset()
    row = max(map(int, tensor.stride())) if tensor.dim() > 1 else tensor.numel()
    return CodedTensor(number, int(start), tensor.numel(), max(row, 1))


def _whole(slots: Sequence[CodedTensor], num_rails: int, rail: int) -> list[CodedTensor]:
    """Return the tensors that ``rail`` sends, if each tensor is sent whole by one of the rails."""
    loads, mine = [0] * num_rails, []
    for slot in sorted(slots, key=lambda slot: -slot.numel):
        least = loads.index(min(loads))
        loads[least] += slot.numel
        if least == rail:
            mine.append(slot)
    return sorted(mine)


def _places(slots: Sequence[CodedTensor], own: slice) -> list[CodedTensor]:
    """Return the parts of tensors that are in the slice ``own``, in order."""
    places, first = [], 0
    for slot in slots:
        start, stop = max(slot.start, own.start), min(slot.stop, own.stop)
        if start < stop:
            place = slot._replace(start=start, numel=stop - start, offset=start - slot.start)
            places.append(place._replace(first=first))
            first += place.numel
    return places


def _joined(places: Sequence[CodedTensor]) -> list[slice]:
    """Return the spans of a bucket that contain ``places``, merged if adjacent."""
    spans: list[slice] = []
    for place in places:
        start = spans.pop().start if spans and spans[-1].stop == place.start else place.start
        spans.append(slice(start, place.stop))
    return spans


def _spans_between(slots: Sequence[CodedTensor], own: slice) -> list[slice]:
    """Return the spans of the slice ``own`` that are outside of all ``slots``."""
    edges = [own.start]
    for span in _joined(_places(slots, own)):
        edges += [span.start, span.stop]
    edges.append(own.stop)
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _length(spans: Sequence[slice]) -> int:
    return sum(span.stop - span.start for span in spans)
