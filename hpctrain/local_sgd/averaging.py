"""Averaging of tensors over ranks with weights, in buckets and with compression."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.agreement import require_equal
from hpctrain.comm.bucket import TensorSpec, plan_buckets, slice_bounds
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.norms import norms
from hpctrain.comm.operation_result import FINISHED, Work
from hpctrain.comm.tensor_bucket import TensorBucket
from hpctrain.comm.threaded import start_on
from hpctrain.compress.codec import Codec, settings_of
from hpctrain.core.errors import NotFiniteError
from hpctrain.core.torch_compat import foreach_copy_
from hpctrain.core.units import by_rank
from hpctrain.local_sgd.averaged_tensors import NamedTensors, Tensors


class Averaging:
    """Replaces tensors by their weighted mean over ranks.

    ``start`` copies the tensors and begins to send the copies; ``finish`` waits and replaces the
    tensors by the means. Both are collective. Training may continue in between, and tensors may be
    added and removed, since the tensors in buckets are identified by name.

    The constructor is collective: it allocates the buckets.

    Args:
        comm: ranks to average over.
        codec: compression of the buckets.
        tensors: tensors to average.
        bucket_bytes: largest size of a bucket.
        names: function that returns the names of the tensors to average; None for all tensors.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec,
        tensors: Tensors,
        bucket_bytes: int,
        names: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._comm, self._codec = comm, codec
        self._tensors, self._bucket_bytes, self._names = tensors, bucket_bytes, names
        self._works: list[Work] = []
        self._held: set[str] = set()
        self._buckets: list[TensorBucket] = []
        self._members: list[Sequence[int]] = []  # indices of the tensors in each bucket
        self.build(float(comm.rank == 0), 1.0)

    @property
    def is_in_flight(self) -> bool:
        """Whether an average was started and not finished."""
        return bool(self._works)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank sends per average."""
        return sum(self._codec.num_bytes(one.bucket) for one in self._buckets)

    def fits(self) -> bool:
        """Return whether the current tensors have the names, shapes and dtypes of the buckets."""
        tensors = self._tensors
        return not tensors.is_outdated() and self._specs == _specs(self._current())

    def build(self, weight: float, scale: float) -> None:
        """Agree on the current tensors, and allocate the buckets. Collective.

        Args:
            weight: as for ``start``; used by subclasses.
            scale: as for ``start``; used by subclasses.

        Raises:
            MismatchError: ranks have different tensors; on every rank.
            NodeMemoryError: memory is not sufficient; on every rank.
        """
        del weight, scale
        self._tensors.agree(self._comm)
        self._lay_out(self._current())

    @torch.no_grad()
    def start(self, weight: float, scale: float) -> None:
        """Begin to send copies of the tensors. Collective.

        Args:
            weight: weight of this rank; with 0 the rank's tensors are ignored, even if they are
                not finite.
            scale: one over the sum of all ranks' weights.
        """
        found = self._tensors.find()
        self._held = {*self._tensors.held()}
        for number, bucket in enumerate(self._buckets):
            if weight == 0.0:
                bucket.flat.zero_()
            else:
                self._fill(number, found)
                if weight != 1.0:
                    bucket.flat.mul_(weight)
            self._works.append(start_on(self._comm, self._reduce, bucket, scale))

    @torch.no_grad()
    def finish(self, keep: float = 0.0) -> float:
        """Replace the tensors that still exist by their means. Collective.

        Args:
            keep: weight, 0 to 1, of the current values in the new values of trained tensors.

        Returns:
            The squared distance of this rank's tensors from their means.

        Raises:
            NotFiniteError: the mean is not finite; on every rank.
        """
        self.drop()
        found, squared = self._tensors.find(), 0.0
        for number in range(len(self._buckets)):
            self._restore_mean(number)
            for _, tensor, place in self._pairs(number, found):
                squared += float(norms([tensor - place.to(tensor.device)])) ** 2
        if not math.isfinite(squared):
            self._require_finite(found)
        self._advance()
        replaced = []
        for number in range(len(self._buckets)):
            self._read_result(number)
            whole = []
            for name, tensor, place in self._pairs(number, found):
                if keep and name not in self._held:
                    tensor.lerp_(place.to(tensor.device), 1.0 - keep)
                else:
                    whole.append((tensor, place))
                    replaced.append(name)
            _copy(whole)
        self._tensors.became_equal({*replaced})
        return squared

    def own_state(self) -> dict[str, Any] | None:
        """Wait for the average in flight; return copies of its sums and of the codec's state.

        Returns None if no average is in flight and the codec has no state.
        """
        for work in self._works:
            work.wait()
        state: dict[str, Any] = {}
        if self._works:
            flats = [bucket.flat.clone() for bucket in self._buckets]
            state = {"names": self.names, "held": sorted(self._held), "flats": flats}
        if codec := self._codec.state_dict():
            state["codec"] = codec
        return state or None

    def load_own_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore a result of ``own_state``. Collective."""
        self.drop()
        state = state or {}
        if "flats" in state:
            self._lay_out_for(state["names"])
            self._held = {*state["held"]}
            for bucket, flat in zip(self._buckets, state["flats"], strict=True):
                bucket.flat.copy_(flat)
                self._works.append(FINISHED)
        if "codec" in state and self._codec.fits(state["codec"]):
            self._codec.load_state_dict(state["codec"])

    def drop(self) -> None:
        """Wait for an average in flight, and drop the result."""
        for work in self._works:
            work.wait()
        self._works = []

    @property
    def names(self) -> list[str]:
        """Names of the tensors in the buckets."""
        return [name for name, _, _ in self._specs]

    def _current(self) -> NamedTensors:
        current = self._tensors.current()
        if self._names is None:
            return current
        names = self._names()
        return [(name, tensor) for name, tensor in current if name in names]

    def _lay_out(self, current: NamedTensors) -> None:
        """Allocate the buckets for the tensors ``current``. Collective."""
        self._specs = _specs(current)
        lines = [
            f"compression {settings_of(self._codec)}",
            *(f"{n} {s} {d}" for n, s, d in self._specs),
        ]
        require_equal(self._comm, lines, "averaged tensors")
        specs = [TensorSpec(name=n, numel=t.numel(), dtype=t.dtype) for n, t in current]
        self._buckets, self._members = [], []
        self._codec.forget()
        for plan in plan_buckets(specs, self._bucket_bytes):
            memory = self._comm.new_bucket(plan.numel, plan.dtype)
            tensors = [current[member][1] for member in plan.members]
            bucket = TensorBucket(memory, tensors, plan.offsets)
            self._codec.prepare(bucket.bucket, [*bucket.parts, bucket.marks], self._comm)
            self._buckets.append(bucket)
            self._members.append(plan.members)

    def _lay_out_for(self, names: Collection[str]) -> None:
        """Allocate the buckets for the tensors ``names``, unless already done. Collective."""
        if {*names} != {*self.names}:
            found = self._tensors.find()
            self._lay_out([(name, tensor) for name, tensor in found.items() if name in names])

    def _pairs(
        self, number: int, found: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, current tensor and value in the bucket for each tensor of a bucket.

        Buckets are in host memory; the tensors may be on a device.
        """
        for member, place in zip(self._members[number], self._buckets[number].parts, strict=True):
            name, shape, _ = self._specs[member]
            tensor = found.get(name)
            if tensor is not None and tuple(tensor.shape) == shape:
                yield name, tensor.detach(), place.to(tensor.dtype)

    def _fill(self, number: int, found: Mapping[str, Tensor]) -> None:
        """Copy the tensors of bucket ``number`` to the bucket, to be sent."""
        self._buckets[number].pack([found[name] for name in self._names_in(number)])

    def _names_in(self, number: int) -> list[str]:
        return [self._specs[member][0] for member in self._members[number]]

    def _restore_mean(self, number: int) -> None:
        """Convert a received bucket to the mean of the tensors; see ``AnchoredAveraging``."""

    def _advance(self) -> None:
        """Update the anchor of ``AnchoredAveraging`` with the received means; else a no-op."""

    def _read_result(self, number: int) -> None:
        """Copy the anchor of ``AnchoredAveraging`` to a bucket, as the result; else a no-op."""

    def _require_finite(self, found: Mapping[str, Tensor]) -> None:
        """Raise ``NotFiniteError`` if the mean is not finite. Collective."""
        if all(bool(bucket.flat.isfinite().all()) for bucket in self._buckets):
            return
        names = [n for n in self.names if n in found and not bool(found[n].isfinite().all())]
        of_ranks = self._comm.allgather_object(names[0] if names else None)
        raise NotFiniteError(
            "a mean over replicas must be finite, but has NaN or inf: "
            f"{by_rank(of_ranks) or 'the sum overflows'}; restart from a checkpoint with a "
            "smaller learning rate, or exclude the rank by take_part(takes_part=False)"
        )

    def _reduce(self, bucket: TensorBucket, scale: float) -> None:
        with torch.no_grad():
            bucket.send(lambda one: self._codec.allreduce_(one, self._comm, scale=scale).wait())


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first tensor."""
    if pairs:
        targets, sources = map(list, zip(*pairs, strict=True))
        foreach_copy_(targets, sources)


def _specs(tensors: NamedTensors) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]


class NodeVector:
    """Vector in node memory, initially zero, of which each rank of the node writes one slice.

    A barrier must separate a write by one rank from reads by other ranks.

    Args:
        node: ranks of the node; without shared memory, each rank stores a full copy.
        numel: number of elements.
        dtype: dtype of the elements.
    """

    def __init__(self, node: Communicator, numel: int, dtype: torch.dtype) -> None:
        slices = [slice_bounds(numel, node.size, rank) for rank in range(node.size)]
        largest = max(bounds.stop - bounds.start for bounds in slices)
        peers = node.new_bucket(largest, dtype).peers
        if peers:
            self.parts = tuple(
                (bounds, peer[: bounds.stop - bounds.start])
                for bounds, peer in zip(slices, peers, strict=True)
            )
            """Slice of each rank of the node: bounds in the vector, and elements."""
            self.bounds, self.own = self.parts[node.rank]
        else:
            self.bounds, self.own = slice(0, numel), torch.zeros(numel, dtype=dtype)
            self.parts = ((self.bounds, self.own),)

    def read(self, out: Tensor) -> None:
        """Copy the vector into ``out``, 1-D; a barrier of the node must precede the call."""
        for bounds, part in self.parts:
            out[bounds].copy_(part)


class AnchoredAveraging(Averaging):
    """Averages θ_anchor - θ_k over the ranks k, updates the anchor, and copies the anchor to all.

    The anchor is a copy of the tensors that is identical on all ranks. A codec may round the
    differences: the rounding error is proportional to the differences, and all ranks continue with
    identical values. Anchor and momentum are stored in node memory, and each rank of the node
    updates a slice of both. Without shared memory, each rank stores a full copy of both.

    The anchor takes Nesterov SGD steps with ``lr`` and ``momentum``; by default the anchor becomes
    the mean. The constructor is collective: it sets the anchor to the tensors of rank 0.

    Args:
        *averaging: as for ``Averaging``.
        node: ranks of this node.
        lr: learning rate of the anchor.
        momentum: Nesterov momentum of the anchor.
    """

    def __init__(
        self, *averaging: Any, node: Communicator, lr: float = 1.0, momentum: float = 0.0
    ) -> None:
        self._node, self._lr, self._momentum = node, lr, momentum
        super().__init__(*averaging)

    @torch.no_grad()
    def build(self, weight: float, scale: float) -> None:
        """Allocate the buckets for the current tensors. Collective.

        Anchors and momenta are kept. The anchor of a new tensor is the weighted mean over ranks.
        """
        before = self.shared_state() if self._buckets else {"momentum": {}, "anchor": {}}
        super().build(weight, scale)
        found, known = self._tensors.find(), before["anchor"]
        new = {n for n, shape, _ in self._specs if n not in known or known[n].shape != shape}
        anchors, momenta = {**known}, {**before["momentum"]}
        for number, bucket in enumerate(self._buckets):
            places = [pair for pair in self._pairs(number, found) if pair[0] in new]
            bucket.flat.zero_()
            for _, tensor, place in places if weight else ():
                place.copy_(tensor).mul_(weight)
            if places:
                self._comm.allreduce_(bucket.bucket, scale=scale).wait()
            for name, _, place in places:
                anchors[name], momenta[name] = place.clone(), torch.zeros_like(place)
        self._put(anchors, momenta)

    def anchor(self) -> dict[str, Tensor]:
        """Return copies of the anchor's tensors, by name. Collective."""
        found = self._by_name(self._anchors)
        self._node.barrier()  # another rank may update its slice after this call
        return found

    def shared_state(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of anchor and momentum, by name, the same on every rank. Collective."""
        momentum = self._by_name(self._momenta) if self._momenta else {}
        return {"momentum": momentum, "anchor": self.anchor()}

    @torch.no_grad()
    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Restore a result of ``shared_state`` of any number of ranks. Collective."""
        self._lay_out_for(state["anchor"])
        self._put(state["anchor"], state["momentum"])

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Set this rank's tensors to the anchor. Local, but called by all ranks."""
        found = self._tensors.find()
        for number in range(len(self._buckets)):
            self._read_result(number)
            _copy([(tensor, place) for _, tensor, place in self._pairs(number, found)])
        self._tensors.became_equal({*self.names})

    def _lay_out(self, current: NamedTensors) -> None:
        super()._lay_out(current)
        self._anchors = [self._vector_for(bucket) for bucket in self._buckets]
        self._momenta = [self._vector_for(bucket) for bucket in self._buckets if self._momentum]
        self._moves: list[Tensor] = []

    def _vector_for(self, bucket: TensorBucket) -> NodeVector:
        flat = bucket.flat
        return NodeVector(self._node, flat.numel(), flat.dtype)

    def _fill(self, number: int, found: Mapping[str, Tensor]) -> None:
        super()._fill(number, found)
        self._subtract_from_anchor(number)

    def _restore_mean(self, number: int) -> None:
        own = self._buckets[number].flat[self._anchors[number].bounds]
        self._moves.append(own.clone())
        self._subtract_from_anchor(number)

    def _advance(self) -> None:
        """Update this rank's slices of the anchor with the received means.

        With momentum m and the mean difference d: m <- mu m + d, anchor <- anchor - lr (d + mu m),
        as in torch.optim.SGD(nesterov=True).
        """
        self._node.barrier()  # other ranks may still read the slice that this rank updates
        lr, mu = self._lr, self._momentum
        for momentum, move in zip(self._momenta, self._moves, strict=bool(self._momenta)):
            momentum.own.mul_(mu).add_(move)
            move.add_(momentum.own, alpha=mu)
        for anchor, move in zip(self._anchors, self._moves, strict=True):
            anchor.own.sub_(move, alpha=lr)
        self._moves.clear()
        self._node.barrier()

    def _read_result(self, number: int) -> None:
        self._anchors[number].read(self._buckets[number].flat)

    def _subtract_from_anchor(self, number: int) -> None:
        flat = self._buckets[number].flat
        for bounds, part in self._anchors[number].parts:
            torch.sub(part, flat[bounds], out=flat[bounds])

    def _by_name(self, vectors: Sequence[NodeVector]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, vector in enumerate(vectors):
            bucket = self._buckets[number]
            flat = torch.empty_like(bucket.flat)
            vector.read(flat)
            found |= zip(self._names_in(number), bucket.places_in(flat), strict=True)
        return found

    def _put(self, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]) -> None:
        """Write this rank's slices of anchors and momenta. Collective over the node."""
        self._node.barrier()  # another rank may still read the slice that this rank overwrites
        for vectors, tensors in ((self._anchors, anchors), (self._momenta, momenta)):
            for number, vector in enumerate(vectors):
                bucket = self._buckets[number]
                flat = torch.zeros_like(bucket.flat)
                named = self._names_in(number)
                foreach_copy_(bucket.places_in(flat), [tensors[name] for name in named])
                vector.own.copy_(flat[vector.bounds])
        self._node.barrier()
