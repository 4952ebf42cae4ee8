"""Loader of the batches of an epoch; each global batch is divided among the ranks."""

import logging
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.ops import Op
from hpctrain.core.checks import Count, Number, Positive, checked
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.python_compat import Self, add_note
from hpctrain.core.units import by_rank
from hpctrain.core.user_error import user_lines
from hpctrain.data.data_split import Split, SplitSteps
from hpctrain.data.order.window import WindowShape
from hpctrain.data.reading import Reading
from hpctrain.data.samples import Batch, Indices
from hpctrain.data.steps import Ordering, OrderName, Skipped, Steps
from hpctrain.data.workers.shm_message import portable

_LOG = logging.getLogger(__name__)

VERSION, READER = 1, "1.0"
"""Version of the format of ``state_dict``, and the oldest hpctrain that reads this version."""

_RULES = {
    "global_batch": Number,
    "threads": Number,
    "prefetch": Number,
    "workers": Count,
    "worker_timeout_s": Positive,
    "tail": Literal["short", "drop"],
    "ragged": Literal["packed", "padded"],
    "on_corrupt": Literal["raise", "skip"],
}


@dataclass(kw_only=True)
class Loader(Reading):
    """Iterable over the batches of an epoch; threads or processes read the batches ahead.

    An order maps positions of an epoch to samples. Step ``k`` has the samples at the positions
    ``[k * global_batch, (k + 1) * global_batch)`` for any number of ranks. Each rank gets a part
    of these samples, and all ranks run the same number of steps. An error that occurs while a
    batch is read is raised at the step of this batch; with ``comm``, on every rank.

    An iteration begins at the current position: after ``load_state_dict`` or an early exit, at the
    first batch that was not delivered; after the last batch, at the start of the next epoch.

    ``Division`` documents the arguments that assign samples to ranks, and ``Reading`` the
    arguments for reading.
    """

    comm: Communicator | None = None
    """Ranks that load together. With ``comm``, iterating is collective and errors are raised on
    every rank."""
    seed: int = 0  # seed of the order of every epoch; identical on every rank
    order: OrderName = "auto"
    """``global``: any sample may be at any position. ``window``: whole blocks are read and mixed,
    for small samples of a large data set. ``sequential``: the order on disk. ``auto``: window
    if the data set has more than 1 GiB and does not fit into one window, and if its samples have
    less than 100 kB; otherwise global."""
    window: WindowShape | None = None
    """Sizes of a window order; by default ``WindowShape.of`` chooses them."""
    split: Split | Path | str | None = None
    """Division of the data set into parts, or the path of its file. Each rank reads consecutive
    parts; each step has samples of every part in proportion to the size of the part."""
    on_corrupt: Literal["raise", "skip"] = "raise"
    """``raise`` an error for damaged samples, or ``skip`` them on all ranks with a warning."""
    epoch: int = field(default=0, init=False)  # epoch of the next batch
    consumed: int = field(default=0, init=False)
    """Number of samples of this epoch that were delivered, over all ranks."""
    step_samples: int = field(default=0, init=False)
    """Number of samples of the last delivered step, over all ranks."""
    _ordering: Ordering = field(init=False, repr=False)
    _skipped: Skipped = field(default_factory=Skipped, init=False, repr=False)
    _pass: object = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.comm is not None:
            self.rank, self.size = self.comm.rank, self.comm.size
        if isinstance(self.split, str | PathLike):
            self.split = Split.read(self.split)
        _require(
            self.split is None or isinstance(self.split, Split),
            f"split must be a Split or the path of its file, got {self.split!r}",
        )
        self._check()
        if not len(self):
            raise DataError(
                f"tail={self.tail!r} must leave at least one step, got {len(self.dataset)} "
                f"samples and a global batch of {self.global_batch}; use tail='short', a "
                f"smaller batch or more data"
            )
        if self.pin_memory and not torch.accelerator.is_available():
            _LOG.warning("pin_memory must be False without a GPU, got True; it has no effect")
            self.pin_memory = False
        self._ordering = Ordering.choose(self.order, self.dataset, self.global_batch, self.window)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, the same on every rank."""
        return self.num_steps(len(self.dataset))

    @property
    def num_skipped(self) -> int:
        """Number of damaged samples that are skipped, the same on every rank."""
        return len(self._skipped)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of ``epoch``, which must be the same on every rank.

        Iterators from earlier calls of ``iter()`` must not be used afterwards.
        """
        self.epoch, self.consumed, self._pass = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader; identical on all ranks, for any number of ranks."""
        return {
            **stamp(VERSION, READER),
            "uuid": self.dataset.uuid,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            **self._ordering.record(),
            **({"split": self._split_checksum} if self.split else {}),
            "skipped": [list(some) for some in self._skipped.ranges],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position in ``state``.

        The state may be from a loader with another number of ranks or another global batch. Seed
        and order are set to the values in ``state``.

        Args:
            state: result of ``state_dict``, identical on every rank.

        Raises:
            DataError: the state belongs to other data or is not a loader state.
        """
        if fault := fault_of(state, VERSION):
            raise DataError(f"the state of a loader cannot be read: {fault}")
        try:
            uuid = str(state["uuid"])
            seed, epoch, consumed = (int(state[name]) for name in ("seed", "epoch", "consumed"))
            ordering = Ordering.of(state)
            skipped = Skipped((int(start), int(stop)) for start, stop in state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the state of a loader must be a result of state_dict(), but reading it "
                f"raised {error!r}; pass such a result"
            ) from error
        _require(
            uuid == self.dataset.uuid,
            f"the state of a loader must belong to its data set, {self.dataset.uuid}, but "
            f"belongs to {uuid}; use the same data set, or start without the state",
        )
        _require(
            epoch >= 0 and 0 <= consumed <= len(self.dataset),
            f"the state of a loader must have an epoch of at least 0 and at most "
            f"{len(self.dataset)} consumed samples, got epoch {epoch} and {consumed} samples; "
            f"pass an unchanged result of state_dict()",
        )
        found = state.get("split")
        _require(
            found == self._split_checksum,
            f"a loader must continue with the split of its state, but the split of this loader "
            f"has the checksum {self._split_checksum} and the split of the state has {found}; "
            f"pass the same split, or start without the state",
        )
        self.seed, self.epoch, self.consumed = seed, epoch, consumed
        self._ordering, self._skipped, self._pass = ordering, skipped, None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank, one for each step; collective with ``comm``."""
        names = ("global_batch", "tail", "micro_shards", "on_corrupt")
        arguments = {name: getattr(self, name) for name in names}
        _require_same(self.state_dict() | arguments, self.comm)
        current = self._pass = object()
        has_skipped = True
        while has_skipped:
            # Start at the current position, and again on all ranks after samples were skipped.
            has_skipped = False
            with closing(self._batches()) as batches:
                for batch in batches:
                    _require(
                        self._pass is current,
                        "an iterator of a loader must not be used after another iter(), "
                        "set_epoch() or load_state_dict() of the loader, but this one was; "
                        "call iter() again, or use a separate loader for each iterator",
                    )
                    error = batch if isinstance(batch, Exception) else None
                    if has_skipped := self._skip_damaged(_failures(error, self.comm)):
                        break
                    assert isinstance(batch, Batch)
                    end = min(self.consumed + self.global_batch, len(self.dataset))
                    self.step_samples, self.consumed = end - self.consumed, end
                    # Keep no reference: when the consumer drops the batch, its memory is
                    # free for the next one.
                    given = [batch]
                    del batch
                    yield given.pop()
        if self._pass is current:
            self.epoch, self.consumed = self.epoch + 1, 0

    @property
    def place(self) -> tuple[int, int]:
        """Epoch of the last delivered batch, and number of samples before this batch in the epoch.

        The samples of all ranks are counted.
        """
        return self.epoch, self.consumed - self.step_samples

    def samples_at(self, place: tuple[int, int]) -> Indices:
        """Return the indices of this rank's samples in the batch at a ``place``.

        Not collective.
        """
        return self._skipped.without(self._steps(*place).samples(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        for name, hint in _RULES.items():
            checked(name, getattr(self, name), hint, DataError)
        rank, size, shards = self.rank, self.size, self.micro_shards
        _require(0 <= rank < size, f"rank must be in [0, size), got rank {rank} of {size}")
        _require(
            shards is None or shards >= size,
            f"every rank must have a micro-shard, got micro_shards = {shards} on {size} "
            f"ranks; use more micro-shards, or fewer ranks",
        )
        if isinstance(self.split, Split):
            self.split.check(self.dataset)
            self.split.parts_of(rank, size)
            _require(
                shards is None,
                f"micro_shards must be None with a split, because both divide a step, got "
                f"{shards}; omit one of them",
            )
        skips = self.on_corrupt == "skip"
        _require(
            shards is None or not skips,
            f"on_corrupt must be 'raise' with micro_shards, because skipped samples would "
            f"move samples between micro-shards, got {self.on_corrupt!r}; omit one of them",
        )
        _require(
            not skips or size == 1 or self.comm is not None,
            'on_corrupt="skip" must be used with comm on several ranks, because all ranks must '
            f"skip the same samples, but comm is None and size is {size}; pass comm",
        )

    @property
    def _split_checksum(self) -> str | None:
        return self.split.checksum if isinstance(self.split, Split) else None

    def _steps(self, epoch: int, start: int) -> Steps:
        """Return the steps of this rank after the first ``start`` samples of an epoch."""
        order = self._ordering.order(self.dataset, self.seed, epoch)
        positions = range(start, len(self.dataset))
        if isinstance(self.split, Split):
            return SplitSteps(self.split, order, self, positions)
        return Steps(order, self, positions)

    def _batches(self) -> Generator[Batch | Exception]:
        """Yield the batch or the error of each step from the current position.

        An error that prevents all further steps is the last item.
        """
        if not self.num_steps(len(self.dataset) - self.consumed):
            return
        try:
            steps = self._steps(self.epoch, self.consumed)
            with self.reading(steps, self._skipped, self.epoch, self.seed) as batches:
                yield from self._draws.waited(batches)
        except Exception as error:
            yield error

    def _skip_damaged(self, errors: dict[int, Exception]) -> bool:
        """Skip and log the samples that ``errors`` report as damaged.

        Returns False if ``errors`` is empty, otherwise True.

        Raises the error of the lowest rank if ``on_corrupt`` is ``raise``, if an error is not a
        ``CorruptError``, or if all damaged samples are skipped already.
        """
        if not errors:
            return False
        damage = [error for error in errors.values() if isinstance(error, CorruptError)]
        found = [error for error in damage if not self._skipped.covers(error.start, error.stop)]
        if self.on_corrupt == "raise" or len(damage) < len(errors) or not found:
            raise errors[min(errors)]
        for error in found:
            if self._skipped.covers(error.start, error.stop):
                continue  # two ranks found the same damage
            self._skipped = Skipped([*self._skipped.ranges, (error.start, error.stop)])
            if self.rank == 0:
                _LOG.warning(
                    "samples %d to %d are skipped: %s", error.start, error.stop - 1, error
                )
        return True


def _require(is_kept: object, rule: str) -> None:
    if not is_kept:
        raise DataError(rule)


def _failures(error: Exception | None, comm: Communicator | None) -> dict[int, Exception]:
    """Return the error of each rank that failed in this step, by rank; empty if none failed.

    Collective over ``comm``, if given.
    """
    if comm is None:
        return {} if error is None else {0: error}
    flag = torch.tensor(0 if error is None else 1, dtype=torch.int32)
    comm.allreduce_(flag, op=Op.MAX).wait()
    if not flag.item():
        return {}
    report = None if error is None else (portable(error), user_lines(error))
    result = dict[int, Exception]()
    for rank, found in enumerate(comm.allgather_object(report)):
        if found is not None:
            result[rank], frames = found
            add_note(result[rank], "\n".join([f"(raised on rank {rank})", *frames]))
    if error is not None:
        result[comm.rank] = error  # keeps the traceback of this rank
    return result


def _require_same(arguments: dict[str, Any], comm: Communicator | None) -> None:
    """Compare the arguments of all ranks. Collective over ``comm``, if there is one.

    Raises ``DataError`` on every rank: the arguments differ.
    """
    texts = comm.allgather_object(str(arguments)) if comm else [""]
    if len(set(texts)) > 1:
        raise DataError(
            f"all ranks must load the same samples, got {by_rank(texts)}; pass the same data "
            f"set and arguments on every rank, and load the same state"
        )
