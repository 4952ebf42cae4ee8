"""Batches of an epoch: one line of samples, cut into global batches, cut among the ranks."""

import logging
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.core.python_compat import Self, add_note
from hpctrain.core.units import by_rank
from hpctrain.core.user_error import user_lines
from hpctrain.data.order.ordering import Ordering, OrderName
from hpctrain.data.order.window import WindowShape
from hpctrain.data.samples import Batch, Columns, Indices, Samples, padded, pinned
from hpctrain.data.split import Split, SplitSteps
from hpctrain.data.steps import (
    Cut,
    ReadDepth,
    Skipped,
    StepPart,
    Steps,
    Tail,
    cut_apart,
    num_steps,
    prefetched,
)
from hpctrain.data.transform import ThreadDraws, Transform, apply
from hpctrain.data.workers.pool import TIMEOUT_S, DecodePool
from hpctrain.data.workers.shm_message import portable

_LOG = logging.getLogger(__name__)

STATE_FORMAT = 1
"""Of ``state_dict``, in which nothing depends on the number of ranks or on the global batch."""

_CHOICES = {
    "tail": ("short", "drop"),
    "ragged": ("packed", "padded"),
    "on_corrupt": ("raise", "skip"),
}


class _Referable:
    """Gives weak references to a class with slots, as ``weakref_slot`` does since Python 3.11."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Loader(_Referable):
    """Iterates over the batches of an epoch, read ahead by threads.

    All samples of an epoch lie on one line. The samples of step ``k`` are the same set for any
    number of ranks: those at the positions ``[k * global_batch, (k + 1) * global_batch)``. Each
    rank gets a part of them, and every rank runs the same number of steps. Whatever goes wrong
    while reading is raised at the step that it belongs to; with ``comm``, on every rank.

    A pass begins where the loader is: after ``load_state_dict`` or an early exit with the first
    batch that was not delivered. At its end the loader is at the start of the next epoch.
    """

    dataset: Samples  # what to read; the same on every rank
    _: KW_ONLY
    global_batch: int  # samples per step, of all ranks together
    rank: int = 0  # rank of this process; that of ``comm``, if it is given
    size: int = 1  # number of ranks; that of ``comm``, if it is given
    comm: Communicator | None = None
    """The ranks that load together. With it iterating is collective, and ranks fail together."""
    seed: int = 0  # of the order of every epoch; the same on every rank
    order: OrderName = "auto"
    """``global``: any sample can come at any time. ``window``: whole blocks are read and mixed,
    for small samples of a large data set. ``sequential``: as they lie on disk. ``auto``: global
    for samples of 100 kB and for a data set that stays in memory, else window."""
    micro_shards: int | None = None
    """Fixed parts of a global batch, at least as many as ranks, of which each rank gets some in a
    row, so that the parts do not depend on the number of ranks; None for one part per rank."""
    split: Split | Path | str | None = None
    """Parts of the data set, or the file that has them: each rank reads its own, neighbours where
    there are more parts than ranks. Of a step they have samples in proportion to their sizes."""
    tail: Tail = "short"
    """The last samples make a ``short`` step, or are left out: ``drop``."""
    transform: Transform | None = None
    """Makes the values of a batch from those of the data set; runs while reading. ``PerSample``
    makes one of a function of a sample, which may take a random generator: in threads the global
    ones are refused."""
    threads: int = 4  # how many steps are read at the same time
    prefetch: int = 4  # batches read ahead; more for more ``workers``
    workers: int = 0  # processes that read and transform, for a transform that holds Python's lock
    worker_timeout_s: float = TIMEOUT_S
    """How long a worker may take for a batch, ``inf`` for ever. One that takes longer is ended,
    and the error says where it stood. Less than ``HPCTRAIN_TIMEOUT``: then others give up."""
    pin_memory: bool = False  # whether batches lie in memory from which a GPU can copy by itself
    ragged: Literal["packed", "padded"] = "packed"
    """Samples of different lengths come as ``Ragged``, or as a tensor filled up with zeros and a
    field ``<field>_lengths``."""
    on_corrupt: Literal["raise", "skip"] = "raise"
    """Damaged samples are an error, or all ranks leave them out from then on, with a warning."""
    window: WindowShape | None = None
    """What a window order mixes; by default chosen so that it mixes well."""
    epoch: int = field(default=0, init=False)  # the epoch of the next batch
    consumed: int = field(default=0, init=False)
    """Samples of this epoch that were delivered, on all ranks together."""
    step_samples: int = field(default=0, init=False)
    """Samples of the step that was delivered last, on all ranks together."""
    _ordering: Ordering = field(init=False, repr=False)
    _skipped: Skipped = field(init=False, repr=False)
    _draws: ThreadDraws = field(init=False, repr=False)
    _pool: DecodePool | None = field(default=None, init=False, repr=False)
    _pass: object = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.comm is not None:
            self.rank, self.size = self.comm.rank, self.comm.size
        if isinstance(self.split, str | PathLike):
            self.split = Split.read(self.split)
        _require(
            self.split is None or isinstance(self.split, Split),
            f"split is a Split or the path of its file, got {self.split!r}",
        )
        self._check()
        if not len(self):
            raise DataError(
                f"tail={self.tail!r} leaves no step: {len(self.dataset)} samples, a global batch "
                f"of {self.global_batch}; use tail='short', a smaller batch or other data"
            )
        if self.pin_memory and not torch.accelerator.is_available():
            _LOG.warning("pin_memory=True has no effect: there is no GPU")
            self.pin_memory = False
        self._skipped, self._draws = Skipped(), ThreadDraws()
        self._ordering = Ordering.choose(self.order, self.dataset, self.global_batch, self.window)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, the same on every rank."""
        return num_steps(len(self.dataset), self.global_batch, self.tail)

    @property
    def num_skipped(self) -> int:
        """Damaged samples that are left out, the same number on every rank."""
        return len(self._skipped)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, the same on every rank; a pass in progress ends there."""
        self.epoch, self.consumed, self._pass = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: the same on every rank, whatever their number."""
        return {
            "format": STATE_FORMAT,
            "uuid": self.dataset.uuid,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            **self._ordering.record(),
            **({"split": self._split_checksum} if self.split else {}),
            "skipped": [list(some) for some in self._skipped.ranges],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a loader was, with any number of ranks and any global batch.

        Seed and order become those of the state.

        Args:
            state: of ``state_dict``, the same on every rank.

        Raises:
            DataError: it is of other data, or no state of a loader.
        """
        if state.get("format", 0) != STATE_FORMAT:
            raise DataError(
                f"the state of a loader has format {STATE_FORMAT}, got {state.get('format')!r}; "
                f"it was saved by another version of hpctrain, or is not of a loader"
            )
        try:
            uuid = str(state["uuid"])
            seed, epoch, consumed = (int(state[name]) for name in ("seed", "epoch", "consumed"))
            ordering = Ordering.of(state)
            skipped = Skipped((int(start), int(stop)) for start, stop in state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"this is not the state of a loader: {error!r}; give what state_dict() returned"
            ) from error
        self._check_position(uuid, epoch, consumed)
        found = state.get("split")
        _require(
            found == self._split_checksum,
            f"a loader goes on with the split of its state, got one with the checksum "
            f"{self._split_checksum} for {found}; give the same file, or begin without the state",
        )
        self.seed, self.epoch, self.consumed = seed, epoch, consumed
        self._ordering, self._skipped, self._pass = ordering, skipped, None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank, one for each step; collective with ``comm``."""
        names = ("global_batch", "tail", "micro_shards", "on_corrupt")
        arguments = {name: getattr(self, name) for name in names}
        _require_same(self.state_dict() | arguments, self.comm)
        current = self._pass = object()
        left_out = True
        while left_out:
            # From where we are; once more after samples were left out, for all ranks together.
            left_out = False
            with closing(self._batches()) as batches:
                for batch in batches:
                    self._check_pass(current)
                    error = batch if isinstance(batch, Exception) else None
                    if left_out := self._leave_out(_failures(error, self.comm)):
                        break
                    assert isinstance(batch, Batch)
                    end = min(self.consumed + self.global_batch, len(self.dataset))
                    self.step_samples, self.consumed = end - self.consumed, end
                    # Nothing here keeps it: once the consumer drops it, its memory is free for
                    # the next one.
                    given = [batch]
                    del batch
                    yield given.pop()
        if self._pass is current:
            self.epoch, self.consumed = self.epoch + 1, 0

    @property
    def place(self) -> tuple[int, int]:
        """Epoch of the batch that was delivered last, and the samples of all ranks before it.

        Until the next one is asked for.
        """
        return self.epoch, self.consumed - self.step_samples

    def samples_at(self, place: tuple[int, int]) -> Indices:
        """Return the numbers of this rank's samples in the batch of a place; not collective."""
        epoch, start = place
        return self.steps(start, epoch=epoch).part(0).without(self._skipped).indices

    def close(self) -> None:
        """End the worker processes, if there are any; the next pass starts new ones."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        for name in ("global_batch", "threads", "prefetch"):
            number = getattr(self, name)
            _require(number >= 1, f"{name} must be positive, got {number}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, f"{name} is one of {', '.join(choices)}, got {value!r}")
        workers, limit_s = self.workers, self.worker_timeout_s
        _require(workers >= 0, f"workers is a number of processes or 0, got {workers}")
        _require(limit_s > 0, f"worker_timeout_s is positive, inf for no limit, got {limit_s}")
        rank, size, shards = self.rank, self.size, self.micro_shards
        _require(0 <= rank < size, f"rank must be in [0, size), got rank {rank} of {size}")
        _require(
            shards is None or shards >= size,
            f"every rank needs a micro-shard, got micro_shards = {shards} on {size} ranks; "
            f"take more, or fewer ranks",
        )
        if isinstance(self.split, Split):
            self.split.check(self.dataset)
            self.split.parts_of(rank, size)
            _require(shards is None, "a split and micro_shards both divide a step; leave one out")
        skips = self.on_corrupt == "skip"
        _require(
            shards is None or not skips,
            "micro_shards are fixed parts of a global batch, which samples that are left out "
            "would move; use on_corrupt='raise'",
        )
        _require(
            not skips or size == 1 or self.comm is not None,
            'on_corrupt="skip" needs comm: all ranks must skip the same samples',
        )

    @property
    def _split_checksum(self) -> str | None:
        return self.split.checksum if isinstance(self.split, Split) else None

    def _check_position(self, uuid: str, epoch: int, consumed: int) -> None:
        if uuid != self.dataset.uuid:
            raise DataError(
                f"the state was saved with the data set {uuid}, this one is {self.dataset.uuid}; "
                f"give the same data set, or begin without the state"
            )
        if epoch < 0 or not 0 <= consumed <= len(self.dataset):
            raise DataError(
                f"a position is an epoch and 0 to {len(self.dataset)} samples, got epoch {epoch} "
                f"and {consumed} samples; the state was changed"
            )

    def _batches(self) -> Generator[Batch | Exception]:
        """Read on from where we are; give the batch of each step, or what prevents it.

        What prevents all further steps is given at the next one, and is the last.
        """
        if not num_steps(len(self.dataset) - self.consumed, self.global_batch, self.tail):
            return
        try:
            with self._reading() as parts:
                yield from chain.from_iterable(self._draws.waited(parts))
        except Exception as error:
            yield error

    def steps(
        self, start: int = 0, together: int = 1, num_ahead: int = 1, epoch: int | None = None
    ) -> Steps:
        """Return the steps of this rank behind the first ``start`` samples of this or an epoch."""
        cut = Cut(
            num_samples=len(self.dataset),
            start=start,
            global_batch=self.global_batch,
            tail=self.tail,
            rank=self.rank,
            size=self.size,
            micro_shards=self.micro_shards,
        )
        epoch = self.epoch if epoch is None else epoch
        order = self._ordering.order(self.dataset, self.seed, epoch)
        if isinstance(self.split, Split):
            return SplitSteps(self.split, order, cut, together, num_ahead)
        return Steps(order, cut, together, num_ahead)

    def _reading(self) -> AbstractContextManager[Iterator[list[Batch | Exception]]]:
        """Begin to read on, several steps together."""
        depth = ReadDepth.of(
            self.dataset.sample_bytes * self.global_batch / self.size,
            threads=self.threads,
            prefetch=self.prefetch,
            workers=self.workers,
            is_copy=self.dataset.in_memory and not (self.transform or self.pin_memory),
            has_transform=self.transform is not None,
        )
        if self.workers:
            self._pool = self._pool or DecodePool(
                self.dataset,
                self.transform,
                self.workers,
                self.worker_timeout_s,
                any_ranks=self.micro_shards is not None,
            )
        steps = self.steps(self.consumed, depth.together, depth.depth)
        read = partial(self.read, steps, self._pool)
        return prefetched(read, range(len(steps)), threads=depth.threads, depth=depth.depth)

    def read(self, steps: Steps, pool: DecodePool | None, number: int) -> list[Batch | Exception]:
        """Return the batch of each step of a part, or what prevents it. Threads may call it."""
        part = steps.part(number)
        if not self.dataset.in_memory:
            with suppress(Exception):  # told at the step that cannot be read
                if (soon := steps.soon(number)).size:
                    self.dataset.will_need(soon)
        if len(self._skipped):
            part = part.without(self._skipped)
        if len(part.sizes) == 1:
            return [self._alone(part, pool)]
        # An error belongs to one step: then they are read one by one.
        assert self.transform is None  # it would have a thread for each step
        with suppress(Exception):
            columns = cut_apart(self.dataset.take(part.indices), part.sizes)
            return [self._finished(*batch) for batch in zip(columns, part.sizes, strict=True)]
        return [self._alone(single, pool) for single in part.singles()]

    def _alone(self, part: StepPart, pool: DecodePool | None) -> Batch | Exception:
        try:
            if pool is None:
                columns = self.dataset.take(part.indices)
                with self._draws.watched() if self.transform else nullcontext():
                    fields = apply(self.transform, columns, part.indices, self.epoch, self.seed)
            else:
                fields = pool.take(part.indices, self.epoch, self.seed)
            return self._finished(fields, part.sizes[0])
        except Exception as error:  # raised when its step is delivered
            return error

    def _finished(self, fields: Columns, size: int) -> Batch:
        if self.ragged == "padded":
            fields = padded(fields)
        if self.pin_memory:
            fields = pinned(fields)
        return Batch(fields, size)

    def _leave_out(self, errors: dict[int, Exception]) -> bool:
        """Leave damaged samples out from now on, if there are any, and say so.

        Any other error is raised; so is damage outside the samples that were asked for.
        """
        if not errors:
            return False
        damage = [error for error in errors.values() if isinstance(error, CorruptError)]
        news = [error for error in damage if not self._skipped.covers(error.start, error.stop)]
        if self.on_corrupt == "raise" or len(damage) < len(errors) or not news:
            raise errors[min(errors)]
        for error in news:
            if self._skipped.covers(error.start, error.stop):
                continue  # two ranks have met the same
            self._skipped = self._skipped.joined(error.start, error.stop)
            if self.rank == 0:
                _LOG.warning(
                    "samples %d to %d are left out: %s", error.start, error.stop - 1, error
                )
        return True

    def _check_pass(self, current: object) -> None:
        if self._pass is not current:
            raise DataError(
                "a pass over a loader ends when another one begins, and with set_epoch and "
                "load_state_dict; call iter() again, or use a loader for each pass"
            )


def _require(is_kept: bool, rule: str) -> None:  # noqa: FBT001 - reads as the rule itself
    if not is_kept:
        raise DataError(rule)


def _failures(error: Exception | None, comm: Communicator | None) -> dict[int, Exception]:
    """Return what went wrong with the same step, by rank; nothing, on all ranks, if all is well.

    Collective over ``comm``, the ranks that take this step together, if there is one.
    """
    if comm is None:
        return {} if error is None else {0: error}
    flag = torch.tensor(0 if error is None else 1, dtype=torch.int32)
    comm.allreduce_(flag, op=Op.MAX).wait()
    if not flag.item():
        return {}
    told = None if error is None else (portable(error), user_lines(error))
    result = dict[int, Exception]()
    for rank, found in enumerate(comm.allgather_object(told)):
        if found is not None:
            result[rank], frames = found
            add_note(result[rank], "\n".join([f"(raised on rank {rank})", *frames]))
    if error is not None:
        result[comm.rank] = error  # with its traceback
    return result


def _require_same(what: dict[str, Any], comm: Communicator | None) -> None:
    """Return if all ranks say the same. Collective over ``comm``, if there is one.

    Raises ``DataError``: they do not; on every rank.
    """
    if comm is None:
        return
    texts = comm.allgather_object(str(what))
    if len(set(texts)) > 1:
        raise DataError(
            f"all ranks must load the same samples, got {by_rank(texts)}; give every loader the "
            f"same data set and arguments, and load the same state"
        )
