"""The reduction of one step: an opening message, then the buckets, in one order on every rank."""

import time
from collections.abc import Callable

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan import Plan
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.comm.work import FINISHED, Work
from hpctrain.compress.codec import Codec
from hpctrain.errors import CommError
from hpctrain.sync.gradient_buckets import GradientBucket, NamedParameters, Slot, build_buckets
from hpctrain.sync.sample_count import SampleCount


class Reduction:
    """Fills the buckets of a fixed set of parameters and reduces them over all ranks."""

    def __init__(
        self,
        comm: Communicator,
        plan: Plan,
        codec: Codec,
        *,
        average: bool,
    ) -> None:
        """Take what is needed; ``build`` lays the buckets out.

        Args:
            comm: the ranks; one with a thread carries the buckets beside backward.
            plan: when buckets travel, and how large they are.
            codec: what a bucket travels as.
            average: divide the sum by the number of ranks, weighted by samples.
        """
        self.count = SampleCount(comm)
        self.average = average
        self.exposed_seconds = 0.0
        self.slot_of: dict[torch.Tensor, Slot] = {}
        self._comm, self._plan, self._codec = comm, plan, codec
        self._buckets: list[GradientBucket] = []
        self._scale: float | None = None
        self.forget()

    @property
    def has_sent(self) -> bool:
        """Whether gradients of this step have begun to travel."""
        return self._next_bucket > 0

    def build(self, parameters: NamedParameters) -> None:
        """Lay the buckets out anew. Collective."""
        bucket_bytes = None if self._plan.overlap == "end" else self._plan.bucket_bytes
        self._buckets = build_buckets(self._comm, parameters, bucket_bytes)
        self.slot_of = {slot.parameter: slot for bucket in self._buckets for slot in bucket.slots}

    def fits(self, parameters: NamedParameters) -> bool:
        """Say whether these are the parameters of ``build``, in the same dtypes and layouts."""
        slot_of = self.slot_of
        return len(parameters) == len(slot_of) and all(
            (slot := slot_of.get(p)) is not None and slot.fits(p) for _, p in parameters
        )

    def take(self, slot: Slot) -> None:
        """Put a final gradient into its place, and send the buckets that are full."""
        if slot.is_filled and (self._next_bucket > slot.bucket or self.count.weight != 1.0):
            raise CommError(
                f"the gradient of {slot.name} came twice in one backward, and only once in the "
                f"first step; keep the graph as it is, or checkpoint with use_reentrant=False"
            )
        self._fill(slot)
        if self._plan.overlap == "end":
            return
        while self._next_bucket < len(self._buckets) and self._is_full(self._next_bucket):
            if self._next_bucket == 0:
                self._works.append(self._run(self._open, False))  # noqa: FBT003
            self._launch_next()

    def complete(self, changed: NamedParameters | None = None) -> None:
        """Fill what is missing, send what is not sent, wait for all of it. Collective.

        Args:
            changed: the parameters of today where they are no longer those of ``build``: the
                buckets are then laid out anew. All ranks give some, or none does.

        Raises:
            MismatchError: the parameters have changed on some ranks only; on every rank.
        """
        if not self.has_sent:
            self._clocked(self._run(self._open, changed is not None).wait)
            if changed is not None:
                self.build(changed)
        for slot in self.slot_of.values():
            self._fill(slot)
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        self._clocked(self._wait)
        for slot in self.slot_of.values():
            slot.settle()
        self.exposed_seconds = self._waited_s
        self.forget()

    def forget(self) -> None:
        """Expect the gradients of another step; places that were filled count as empty."""
        self._next_bucket = 0
        self._works: list[Work] = []
        self._waited_s = 0.0
        for bucket in self._buckets:
            bucket.num_empty = len(bucket.slots)
            for slot in bucket.slots:
                slot.is_filled = False
                slot.fires = 0

    def _fill(self, slot: Slot) -> None:
        if not slot.is_filled:
            self._buckets[slot.bucket].num_empty -= 1
            with torch.no_grad():
                slot.fill(self.count.weight if self.average else 1.0)

    def _is_full(self, index: int) -> bool:
        return self._buckets[index].num_empty == 0

    def _launch_next(self) -> None:
        index = self._next_bucket
        self._next_bucket += 1
        self._works.append(self._run(self._reduce, index))

    def _run(self, function: Callable[..., None], *args: object) -> Work:
        """Carry out what talks to other ranks: on the thread if there is one, else here."""
        if isinstance(self._comm, ThreadedCommunicator):
            return self._comm.submit(function, *args)
        self._clocked(lambda: function(*args))
        return FINISHED

    def _clocked(self, wait: Callable[[], object]) -> None:
        start = time.perf_counter()
        wait()
        self._waited_s += time.perf_counter() - start

    def _wait(self) -> None:
        for work in self._works:
            work.wait()

    def _open(self, outdated: bool) -> None:  # noqa: FBT001 - goes through a thread
        total = self.count.exchange(outdated=outdated)
        self._scale = 1.0 / total if self.average else None

    def _reduce(self, index: int) -> None:
        with torch.no_grad():
            bucket = self._buckets[index]
            bucket.write_marks()
            self._codec.allreduce_(bucket.bucket, self._comm, scale=self._scale).wait()
