"""The checkpoints of a run: when to save, which to keep, and from which to resume."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpctrain.checkpoint import loading, saving
from hpctrain.checkpoint.background import BackgroundWriter, StateCopy
from hpctrain.checkpoint.checkpoint_config import Files
from hpctrain.checkpoint.checkpoint_directory import (
    SCORE,
    CheckpointDirectory,
    is_unchanged,
    version_of,
)
from hpctrain.checkpoint.refusal import explained, mismatches, of_save
from hpctrain.checkpoint.schedule import CheckpointSchedule
from hpctrain.comm.agreement import agreed, on_root, require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.core.checks import Count, Number, checked, require_open
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.paths import absolute
from hpctrain.core.units import parse_seconds

_LOG = logging.getLogger(__name__)


class Stateful(Protocol):
    """Protocol of objects with a state to save, such as the error feedback of a codec.

    The state is a tree of tensors and plain values. Each rank has its own state.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, as values that later steps do not change."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that this rank saved, in a run with the same number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Size and times of a checkpoint; the times are maxima over all ranks."""

    step: int
    num_bytes: int  # bytes of all tensors, on all ranks
    stall_s: float  # seconds that training waited
    write_s: float  # seconds until all files were on disk
    compare_s: float  # seconds of these times in which replicated tensors were compared

    @property
    def bytes_per_s(self) -> float:
        """Speed of all ranks together."""
        return self.num_bytes / self.write_s if self.write_s else math.inf


class Manager:
    """Saves checkpoints in the background and finds the one to resume from.

    The training thread copies the share of this rank to memory that later saves reuse, and
    computes checksums. A second thread with a separate communicator writes the copy; a third, on
    rank 0, removes expendable checkpoints. A save waits until the previous save is complete.

    A failed save keeps the older checkpoints. The next ``save``, ``wait`` or ``close`` raises its
    error on every rank, with the step of the failed save; training may continue, and save again.

    Construction is collective.

    Args:
        directory: directory of all checkpoints of the run, seen by all ranks; need not exist.
        comm: communicator of the ranks; used only in collective calls.
        every: interval of saves: a number of steps, a time such as ``"10min"``, ``"auto"`` or
            ``"none"``.
        keep: number of newest checkpoints that are kept, at least 1.
        keep_best: number of checkpoints with the best score that are kept in addition.
        mtbf: mean time between two failures of the whole job, in seconds or as text such as
            ``"24h"``; required by ``"auto"``.
        background: whether training continues while a checkpoint is written; training waits if
            the MPI library does not allow calls from two threads.
        guard: called on rank 0, in any thread, before a checkpoint is written, before it
            is published, and before other checkpoints are removed; may raise CheckpointError to
            prevent this.
        files: one file per node, or per rank; see ``save``.

    Raises:
        ConfigError: a value is not valid.
        MismatchError: the ranks pass different values; on every rank.
    """

    def __init__(  # noqa: PLR0913 - keys of table [checkpoint]
        self,
        directory: Path | str,
        comm: Communicator,
        *,
        every: int | str = "none",
        keep: int = 2,
        keep_best: int = 0,
        mtbf: float | str | None = None,
        background: bool = True,
        guard: Callable[[], None] | None = None,
        files: Files = "node",
    ) -> None:
        given = [f"every {every}", f"keep {keep}", f"keep_best {keep_best}", f"mtbf {mtbf}"]
        given += [f"background {background}", f"files {files}"]
        require_equal(comm, given, "an argument of Manager", "pass the same values")
        with agreed(comm, ConfigError):
            checked("keep", keep, Number)
            checked("keep_best", keep_best, Count)
            checked("files", files, Files)
            mtbf_s = parse_seconds(mtbf) if isinstance(mtbf, str) else mtbf
            self._schedule = CheckpointSchedule(every, mtbf_s=mtbf_s, now=time.monotonic())
            self._shelf = CheckpointDirectory(absolute(directory))
        self._comm = comm
        self._keep = keep
        self._keep_best = keep_best
        self._guard = guard
        self._files = files
        self._damaged: dict[int, str] = {}
        self._figures: Figures | None = None
        self._step: int | None = None  # step of the last checkpoint saved or loaded
        self._has_score = False  # whether that checkpoint has a score
        self._stall_s = 0.0
        # One copy for the state, one for private values.
        self._snapshots = (StateCopy(comm.rank, comm.size), StateCopy())
        self._writer = BackgroundWriter[Figures](comm, background=background)
        self._is_open = True

    def due(self, step: int, now: float | None = None) -> bool:
        """Return whether a checkpoint is due after ``step`` steps. Not collective.

        If ``every`` is a number of steps, all ranks return the same. If it is a time, only rank 0
        can return True: the ranks must combine their results, and call ``save`` if any is True.

        Args:
            step: number of steps done.
            now: value of ``time.monotonic()``, which is the default.
        """
        if self._schedule.by_clock and self._comm.rank != 0:
            return False
        return self._schedule.due(step, time.monotonic() if now is None else now)

    def save(  # noqa: PLR0913 - all parts of a checkpoint
        self,
        state: Mapping[str, Any],
        step: int,
        private: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
        *,
        wait: bool = False,
        score: float | None = None,
        source_rank: int | None = None,
    ) -> None:
        """Save a checkpoint, unless the last checkpoint saved or loaded is of the same step.

        Collective. Returns when the state is copied or written, so that the caller may change it.
        A save with a score replaces a checkpoint of the same step without a score.

        Args:
            state: the same tree and the same bits on every rank; see ``save``. Tensors may be on
                any device.
            step: number of steps done.
            private: values of this rank.
            facts: values to store as JSON, such as those to check before a load.
            wait: return when the checkpoint is on disk; an error of the previous save is only
                logged.
            score: quality of the model, larger is better; used by ``keep_best``.
            source_rank: write the state of this rank alone; see ``save``.

        Raises:
            CheckpointError: this or the previous save failed, and nothing was saved; or step,
                score, source_rank or wait differ between ranks; or ``close`` was called; on every
                rank.
        """
        began = time.monotonic()
        try:
            self.wait()
        except CheckpointError as error:
            if not wait:
                raise
            self._warn(str(error))
        with agreed(self._comm, CheckpointError):
            require_open(self._is_open, "a Manager", CheckpointError)
            checked("score", score, float | None, CheckpointError)
            scored = {SCORE: float(score)} if score is not None and math.isfinite(score) else {}
            facts = {**checked("facts", facts or {}, Mapping, CheckpointError), **scored}
        call = [f"step {step}", f"score {scored.get(SCORE)}", f"source_rank {source_rank}"]
        call += [f"wait {wait}"]
        with mismatches():
            require_equal(self._comm, call, "an argument of Manager.save", "pass the same values")
        if step == self._step and (self._has_score or not scored):
            return
        taken = self._taken(step, state, private or {}, source_rank)
        options = saving.SaveOptions(
            step=step,
            facts=facts,
            guard=self._guard,
            source_rank=source_rank,
            files=self._files,
        )
        self._schedule.taken(step, began)
        self._step, self._has_score = step, bool(scored)
        self._stall_s = time.monotonic() - began
        stall_s = None if self._writer.at_once else self._stall_s
        write = partial(self._write, stall_s=stall_s, damaged={*self._damaged})
        self._writer.start(lambda comm: write(comm, taken, options))
        if wait or self._writer.at_once:
            self.wait()
        self._damaged.pop(step, None)

    def wait(self) -> None:
        """Wait for the save in flight. Collective.

        Raises:
            CheckpointError: the last save failed; on every rank, once.
        """
        try:
            with agreed(self._comm, CheckpointError):
                figures = self._writer.join()
        except CheckpointError:
            self._step = None
            self._schedule.cost(self._stall_s, 0.0)  # so that "auto" does not try at every step
            raise
        if figures is not None:
            self._figures = figures
            self._schedule.cost(figures.stall_s, figures.write_s)

    def latest(self) -> Path | None:
        """Return the newest checkpoint with a whole manifest, or None without checkpoints.

        Collective; waits for the save in flight. Newer damaged checkpoints are logged once and
        skipped from now on.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; on every rank.
        """
        step = self._newest()
        return None if step is None else self._shelf.path(step)

    def load_latest(self, *, into: Mapping[str, Any] | None = None) -> loading.Loaded | None:
        """Load the newest readable checkpoint; return None if there are no checkpoints.

        Collective; waits for the save in flight. As in ``latest``, damaged checkpoints are logged
        and skipped. If another job removes or replaces a checkpoint during the read, the directory
        is listed again.

        Args:
            into: parts of tensors that this rank wants; see ``load``.

        Raises:
            CheckpointError: there are checkpoints, and none can be read; on every rank.
        """
        while (step := self._newest()) is not None:
            path = self._shelf.path(step)
            before = version_of(path)
            try:
                loaded = loading.load(path, self._comm, into=into)
            except CheckpointError as error:
                # What another job removed or replaced is not damaged: there may be newer ones.
                if self._comm.broadcast_object(is_unchanged(path, before)):
                    self._skip_damaged(step, str(error))
                continue
            self._step, self._has_score = step, SCORE in loaded.facts
            self._schedule.taken(step, time.monotonic())
            return loaded
        self._step = None  # saved checkpoints were removed
        return None

    def figures(self) -> Figures | None:
        """Return the cost of the last checkpoint that is on disk; None before the first."""
        return self._figures

    def close(self) -> None:
        """Wait for the save in flight and for removals, then end the threads. Collective.

        A second call does nothing. Afterwards ``save`` raises an error; checkpoints can still be
        loaded.

        Raises:
            CheckpointError: the last save failed; on every rank.
        """
        self._writer.settle()
        self._shelf.finish()
        try:
            self.wait()
        finally:
            self._is_open = False
            self._writer.close()

    def _taken(
        self, step: int, state: Any, private: Any, source_rank: int | None
    ) -> saving.SaveSource | CheckpointError:
        """Return the source of the save, or the error of copying the state.

        The writer thread raises the error on all ranks, so that training need not wait for the
        slowest copy.
        """
        try:
            with explained(f"copy the state of step {step}"):
                if self._writer.at_once:
                    return saving.SaveSource.of(state, private, self._comm, source_rank)
                saving.check_source(source_rank, self._comm.size)
                of_state, of_private = self._snapshots
                copy = of_state.take(state, source_rank)
                compared = of_state.checksums, of_state.compare_s
                return saving.SaveSource(copy, of_private.take(private), *compared)
        except CheckpointError as error:
            return error

    def _write(
        self,
        comm: Communicator,
        taken: saving.SaveSource | CheckpointError,
        options: saving.SaveOptions,
        *,
        stall_s: float | None,
        damaged: set[int],
    ) -> Figures:
        """Write a checkpoint, then remove expendable ones. Collective; called by the writer."""
        began = time.monotonic()

        def take() -> saving.SaveSource:
            if isinstance(taken, CheckpointError):
                raise taken
            return taken

        step = options.step
        with of_save(step):
            saved = saving.write(self._shelf.path(step), take, comm, options)
            tidy = partial(self._tidy, step, damaged=damaged - {step})
            on_root(comm, explained(f"tidy {self._shelf.root}")(tidy), CheckpointError)
        seconds = time.monotonic() - began
        mine = seconds if stall_s is None else stall_s, saved.seconds, saved.compare_s
        stalls_s, writes_s, compares_s = zip(*comm.allgather_object(mine), strict=True)
        return Figures(
            step=step,
            num_bytes=saved.bytes,
            stall_s=max(stalls_s),
            write_s=max(writes_s),
            compare_s=max(compares_s),
        )

    def _tidy(self, step: int, *, damaged: set[int]) -> None:
        if self._guard is not None:  # again: another job may have taken over the run
            self._guard()
        self._shelf.tidy(step, keep=self._keep, keep_best=self._keep_best, damaged=damaged)

    def _newest(self) -> int | None:
        """Return the newest step with a whole manifest, or None. Collective."""
        self._writer.settle()
        look = explained(f"list checkpoints in {self._shelf.root}")(self._shelf.newest)
        step, faults = on_root(self._comm, partial(look, self._damaged), CheckpointError)
        for damaged, fault in faults.items():
            self._skip_damaged(damaged, fault)
        if step is None and self._damaged:
            reasons = "; ".join(self._damaged.values())
            raise CheckpointError(
                f"none of {len(self._damaged)} checkpoints in {self._shelf.root} can be read: "
                f"{reasons}; restore a checkpoint from a backup, or move all of them to another "
                f"directory to start the run from the beginning"
            )
        return step

    def _skip_damaged(self, step: int, fault: str) -> None:
        self._damaged[step] = fault
        self._warn(f"{fault}; the checkpoint of step {step} is skipped")

    def _warn(self, text: str) -> None:
        if self._comm.rank == 0:
            _LOG.warning("%s", text)
