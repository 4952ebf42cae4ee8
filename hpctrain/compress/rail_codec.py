"""The part that lossy codecs share: a node sums exactly, and only what crosses the rail is coded.

    part = comm.reduce_node(bucket, scale=scale)     # exact, inside the node
    codec.reduce_(share, values, comm.internode)     # what the codec is: it sends less
    comm.publish(bucket)                             # the same bits on every rank of the node

``values`` are the elements of this rank's slice that may lose something. The others, marks above
all, are summed as they are. Without node memory each rank is a node of its own.
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
    """A tensor of a bucket, or the part of it that is coded on this rank."""

    number: int  # of the tensor in its bucket
    start: int  # its first element in the bucket
    numel: int
    row: int  # elements of a row of the tensor: all weights into one output
    offset: int = 0  # elements of the tensor before it
    first: int = 0  # its first element among those that are coded

    @property
    def stop(self) -> int:
        """The element of the bucket behind its last one."""
        return self.start + self.numel

    @property
    def end(self) -> int:
        """The coded element behind its last one."""
        return self.first + self.numel


class CodedShare:
    """What one rank codes of one bucket, and what it remembers of it."""

    def __init__(
        self,
        slots: Sequence[CodedTensor],
        places: Sequence[CodedTensor],
        exact: Sequence[slice],
        num_exact: int,
        dtype: torch.dtype,
    ) -> None:
        """Take all tensors, what is coded of them, and the spans that are summed as they are.

        Of those the first ``num_exact`` elements are of tensors, the rest are marks.
        """
        self.slots, self.places = slots, places
        self.exact, self.num_exact = exact, num_exact
        self.spans = _joined(places)
        self.dtype = dtype if dtype is torch.float64 else torch.float32
        """In which it is calculated; 16 bits are widened."""
        self.numel = _length(self.spans)
        self.bucket = 0
        """Number of the bucket, in the order in which they were prepared."""
        self.memory: dict[str, Tensor] = {}
        """What the next step depends on, by name."""
        self.num_steps = 0

    def remembered(self, name: str) -> Tensor:
        """Return what is remembered of the coded values by this name, zeros at first."""
        if name not in self.memory:
            self.memory[name] = torch.zeros(self.numel, dtype=self.dtype)
        return self.memory[name]

    def forget_what_is_not_finite(self, result: Tensor) -> None:
        """Keep what a step that is not finite has left out of the next ones."""
        if self.memory and not math.isfinite(result.sum().item()):
            for value in self.memory.values():
                value.nan_to_num_(0.0, 0.0, 0.0)


_UNSENT = ("error", "late error", "sum")
"""What shares remember that would have been sent by a codec without loss."""


class _Prepared(NamedTuple):
    """A bucket, what this rank codes of it, and what all rails of a node do."""

    bucket: Bucket
    share: CodedShare
    whole: CodedShare  # the same on all ranks
    marks: Tensor


class RailCodec:
    """The base of codecs; a subclass has ``reduce_`` and ``bytes_of``, all else is here."""

    keeps_unsent = False
    """Whether shares remember what was not sent yet,"""
    unsent = "error"
    """and by which name."""
    takes_tensors = False
    """Whether a rail takes whole tensors; else a slice of each bucket."""

    def __init__(self) -> None:
        self._prepared: dict[int, _Prepared] = {}
        self._before: list[CodedShare] = []
        self.rail_s = 0.0

    def reduce_(self, share: CodedShare, values: Tensor, link: Internode) -> None:
        """Replace flat ``values`` by what the codec makes of the sum over ``link``.

        Collective over it. Called in every step with the same share for the same values; ranks of
        the link have the same spans.
        """
        raise NotImplementedError

    def bytes_of(self, share: CodedShare) -> int:
        """Return how many bytes stand for the values of a share, in one message."""
        raise NotImplementedError

    def after_exact(self, share: CodedShare, values: Tensor) -> None:
        """Change the sums of what was summed as it is, if a codec does more than to sum."""

    def warning(self, optimizer: Optimizer) -> str:  # noqa: ARG002 - for subclasses
        """Return why training by this optimizer would not converge; see ``Codec``."""
        return ""

    def is_exact(self, tensor: Tensor) -> bool:  # noqa: ARG002 - for subclasses
        """Say whether a tensor is summed as it is, as small ones may be; marks are in any case."""
        return False

    def prepare(self, bucket: Bucket, parts: Sequence[Tensor], comm: Communicator) -> None:
        """Divide the bucket, if anything of it is to be coded; see ``Codec``."""
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
        """Drop all shares; new ones for the same tensors remember what these did."""
        self._before = self._shares or self._before
        self._prepared.clear()

    @property
    def _shares(self) -> list[CodedShare]:
        return [each.share for each in self._prepared.values()]

    def num_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of a node's codes; see ``Codec``."""
        prepared = self._prepared.get(id(bucket))
        if prepared is None:
            return bucket.flat.nbytes
        _, share, whole, _ = prepared
        whole.num_steps = share.num_steps
        return self.bytes_of(whole) + _length(whole.exact) * bucket.flat.itemsize

    def allreduce_(self, bucket: Bucket, comm: Communicator, *, scale: float | None) -> Work:
        """Sum inside the node, code what crosses the rail; see ``Codec``."""
        prepared = self._prepared.get(id(bucket))
        if prepared is None:
            return comm.allreduce_(bucket, scale=scale)
        return start_on(comm, self._step, prepared, comm, scale)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what the shares remember, by number of bucket."""
        return {
            str(number): {
                "steps": share.num_steps,
                "numel": share.numel,
                "memory": {name: value.clone() for name, value in share.memory.items()},
            }
            for number, share in enumerate(self._shares)
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Say whether a state is that of these buckets; see ``Codec``."""
        shares = self._shares
        return len(state) == len(shares) and all(
            kept["numel"] == share.numel
            for kept, share in zip(state.values(), shares, strict=True)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` has given, for the same buckets."""
        if not self.fits(state):
            raise ConfigError(
                f"the state of a codec is that of the buckets that it was saved with, got one of "
                f"{len(state)} for {len(self._shares)}; keep ranks, parameters and bucket size"
            )
        for kept, share in zip(state.values(), self._shares, strict=True):
            share.num_steps = kept["steps"]
            share.memory = {name: value.clone() for name, value in kept["memory"].items()}

    def shared_state(self, comm: Communicator) -> dict[str, Any]:
        """Return the sums over nodes of what was not sent yet, by tensor; see ``Codec``."""
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
        """Share what was not sent among the nodes of today; see ``Codec``."""
        for share in self._shares:
            share.num_steps, share.memory = state["steps"], {}
        slots = [slot for share in self._shares for slot in share.slots]
        if [slot.numel for slot in slots] != [each.numel() for each in state["unsent"]]:
            return  # nothing was kept, as on one node
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
        if node is not None and self.takes_tensors:  # in slices of several ranks
            node.barrier()
        if link is not None:
            self._over(prepared.share, bucket.peers[0] if bucket.peers else bucket.flat, link)
        if node is not None and self.takes_tensors:
            node.barrier()
        comm.publish(bucket)
        if link is not None:
            self._take_back(prepared, link.size)

    def _take_back(self, prepared: _Prepared, num_nodes: int) -> None:
        """Keep what came of tensors without a gradient on any rank: nobody will see it."""
        bucket, share, _, marks = prepared
        unsent = share.memory.get(self.unsent)
        if unsent is None or not len(marks) or marks.all():
            return
        for place in share.places:
            if not marks[place.number]:
                came = bucket.flat[place.start : place.stop].nan_to_num(0.0, 0.0, 0.0)
                unsent[place.first : place.end].add_(came, alpha=1 / num_nodes)

    def _over(self, share: CodedShare, flat: Tensor, link: Internode) -> None:
        """Reduce this rank's share of a bucket over the link."""
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
    """Give the elements of some spans as one flat tensor, and put changes back."""
    views = [bucket[span] for span in spans]
    if len(views) == 1 and bucket.dtype is dtype:
        yield views[0]
        return
    packed = PackedTensors.copied(views, dtype)
    yield packed.flat
    packed.unpack(views)


def exchanged(link: Internode, outgoing: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
    """Send ``outgoing[r]`` to rank r; return what came from each, ``numels[r]`` elements."""
    return link.start_alltoall(outgoing, numels)()


def _slot(bucket: Bucket, number: int, tensor: Tensor) -> CodedTensor:
    """Say where a tensor lies in its bucket, by rows of memory."""
    start = tensor.storage_offset() - bucket.flat.storage_offset()
    row = max(map(int, tensor.stride())) if tensor.dim() > 1 else tensor.numel()
    return CodedTensor(number, int(start), tensor.numel(), max(row, 1))


def _whole(slots: Sequence[CodedTensor], num_rails: int, rail: int) -> list[CodedTensor]:
    """Return the tensors that a rail takes, about as many elements as the others."""
    loads, mine = [0] * num_rails, []
    for slot in sorted(slots, key=lambda slot: -slot.numel):
        least = loads.index(min(loads))
        loads[least] += slot.numel
        if least == rail:
            mine.append(slot)
    return sorted(mine)


def _places(slots: Sequence[CodedTensor], own: slice) -> list[CodedTensor]:
    """Return what of tensors lies in a slice, one behind the other."""
    places, first = [], 0
    for slot in slots:
        start, stop = max(slot.start, own.start), min(slot.stop, own.stop)
        if start < stop:
            place = slot._replace(start=start, numel=stop - start, offset=start - slot.start)
            places.append(place._replace(first=first))
            first += place.numel
    return places


def _joined(places: Sequence[CodedTensor]) -> list[slice]:
    """Return the spans of a bucket that places take, as few as possible."""
    spans: list[slice] = []
    for place in places:
        start = spans.pop().start if spans and spans[-1].stop == place.start else place.start
        spans.append(slice(start, place.stop))
    return spans


def _spans_between(slots: Sequence[CodedTensor], own: slice) -> list[slice]:
    """Return the spans of a slice in which no tensor lies."""
    edges = [own.start]
    for span in _joined(_places(slots, own)):
        edges += [span.start, span.stop]
    edges.append(own.stop)
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _length(spans: Sequence[slice]) -> int:
    return sum(span.stop - span.start for span in spans)
