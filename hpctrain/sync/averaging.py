"""The mean of some tensors over ranks: into buckets, through a codec, and back."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.agreement import by_rank, require_equal
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.fusion import TensorSpec, plan_buckets
from hpctrain.comm.threaded import start_on
from hpctrain.comm.work import FINISHED, Work
from hpctrain.compress.codec import Codec
from hpctrain.errors import NotFiniteError

NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Load:
    """One bucket, and where the tensors lie in it."""

    bucket: Bucket
    places: tuple[tuple[int, Tensor], ...]
    """Views in the shapes of tensors, by number of tensor."""

    def places_in(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the same places of another tensor that is as long as the bucket."""
        first = self.bucket.flat.storage_offset()
        for member, place in self.places:
            start = place.storage_offset() - first
            yield member, flat[start : start + place.numel()].view(place.shape)


class Averaging:
    """Replaces tensors by their weighted mean over ranks.

    A round has two halves: ``start`` copies the tensors and lets the copies travel, ``finish``
    waits and replaces them. Training may go on in between. Collective, both.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec,
        tensors: Callable[[], NamedTensors],
        bucket_bytes: int,
    ) -> None:
        """Lay the buckets out. Collective.

        Args:
            comm: the ranks.
            codec: what a bucket travels as.
            tensors: returns the tensors of today, with their names; floating point or complex.
            bucket_bytes: largest bucket.

        Raises:
            MismatchError: the ranks do not have the same tensors; on every rank.
            NodeMemoryError: there is not enough memory; on every rank.
        """
        self._comm, self._codec = comm, codec
        self._tensors, self._bucket_bytes = tensors, bucket_bytes
        self._works: list[Work] = []
        self.build()

    @property
    def is_under_way(self) -> bool:
        """Whether a round was started and not finished."""
        return bool(self._works)

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank that travel in a round."""
        return sum(self._codec.num_bytes(load.bucket) for load in self._loads)

    def fits(self) -> bool:
        """Say whether the tensors of today have the names, shapes and dtypes of the buckets."""
        return self._specs == _specs(self._tensors())

    def build(self) -> None:
        """Lay the buckets out for the tensors of today. Collective."""
        today = self._tensors()
        self._specs = _specs(today)
        require_equal(self._comm, [f"{n} {s} {d}" for n, s, d in self._specs], "averaged tensors")
        specs = [TensorSpec(name=n, numel=t.numel(), dtype=t.dtype) for n, t in today]
        self._loads: list[Load] = []
        self._codec.forget()
        for plan in plan_buckets(specs, self._bucket_bytes):
            bucket = self._comm.new_bucket(plan.numel, plan.dtype)
            places = []
            for member, offset in zip(plan.members, plan.offsets, strict=True):
                tensor = today[member][1]
                part = bucket.flat[offset : offset + tensor.numel()]
                places.append((member, part.view(tensor.shape)))
            self._codec.prepare(bucket, [*(v for _, v in places), bucket.flat[:0]], self._comm)
            self._loads.append(Load(bucket, tuple(places)))

    @torch.no_grad()
    def start(self, weight: float, scale: float) -> None:
        """Let copies of the tensors travel.

        Args:
            weight: of this rank; 0 leaves its tensors out, whatever they hold.
            scale: one over the sum of all ranks' weights.
        """
        tensors = self._tensors()
        for number, load in enumerate(self._loads):
            if weight == 0.0:
                load.bucket.flat.zero_()
            else:
                self._fill(number, tensors)
                if weight != 1.0:
                    load.bucket.flat.mul_(weight)
            self._works.append(start_on(self._comm, self._reduce, load.bucket, scale))

    @torch.no_grad()
    def finish(self, keep: float = 0.0) -> float:
        """Replace the tensors.

        Args:
            keep: part of what the tensors hold now that stays, 0 to 1.

        Returns:
            The squared distance of this rank's tensors from their mean.

        Raises:
            NotFiniteError: the mean is not finite, so some rank's tensors are not; on every rank.
        """
        tensors, squared = self._tensors(), 0.0
        self.drop()
        for number, load in enumerate(self._loads):
            self._restore_mean(number)
            for member, place in load.places:
                squared += float(torch.dist(tensors[member][1].detach(), place)) ** 2
        if not math.isfinite(squared):
            self._require_finite(tensors)
        self._advance()
        for number, load in enumerate(self._loads):
            self._read_result(number)
            for member, place in load.places:
                tensor = tensors[member][1]
                if keep:
                    tensor.lerp_(place, 1.0 - keep)
                else:
                    tensor.copy_(place)
        return squared

    def travelled(self) -> list[Tensor] | None:
        """Return copies of what has travelled, after a wait; None where nothing is under way."""
        for work in self._works:
            work.wait()
        return [load.bucket.flat.clone() for load in self._loads] if self._works else None

    def go_on(self, flats: Sequence[Tensor] | None) -> None:
        """Take what ``travelled`` returned: a round is under way, or none is."""
        self.drop()
        for load, flat in zip(self._loads, flats or (), strict=flats is not None):
            load.bucket.flat.copy_(flat)
            self._works.append(FINISHED)

    def drop(self) -> None:
        """Forget a round that is under way."""
        for work in self._works:
            work.wait()
        self._works = []

    def _fill(self, number: int, tensors: NamedTensors) -> None:
        """Put into a bucket what shall travel."""
        for member, place in self._loads[number].places:
            place.copy_(tensors[member][1])

    def _restore_mean(self, number: int) -> None:
        """Make a bucket that has travelled the mean of the tensors: it is that already."""

    def _advance(self) -> None:
        """Find what the tensors become: the mean."""

    def _read_result(self, number: int) -> None:
        """Make a bucket what the tensors become: it is that already."""

    def _require_finite(self, tensors: NamedTensors) -> None:
        """Raise if the mean, which is the same on every rank, is not finite. Collective then."""
        if all(bool(load.bucket.flat.isfinite().all()) for load in self._loads):
            return
        names = [name for name, tensor in tensors if not bool(tensor.isfinite().all())]
        found = self._comm.allgather_object(names[0] if names else None)
        raise NotFiniteError(
            f"a mean over replicas must be finite, {by_rank(found) or 'the sum overflows'}; go "
            f"back to a checkpoint with a smaller learning rate, or let that rank sit out"
        )

    def _reduce(self, bucket: Bucket, scale: float) -> None:
        with torch.no_grad():
            self._codec.allreduce_(bucket, self._comm, scale=scale).wait()


def _specs(tensors: NamedTensors) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
