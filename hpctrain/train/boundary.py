"""Work between two steps: checkpoints and stop requests."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpctrain.checkpoint.manager import Manager
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError
from hpctrain.core.logs import logger
from hpctrain.launch.lease import Lease
from hpctrain.runtime.stopping import StopRequests
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_state import RunState, require_finite_weights

STOP, SAVE, NOT_FINITE = 1, 2, 4  # flags in the step header

RETRY_S = 60.0  # seconds until the next attempt after a failed write of a checkpoint


class Boundary:
    """Writes checkpoints and handles stop requests between two steps.

    Any rank may receive a stop request, and the clock of rank 0 decides when a checkpoint is due.
    Stop requests and due checkpoints are flags in the step header, which all ranks receive, so no
    step needs an additional message.

    Args:
        comm: all ranks.
        requests: stop requests of this rank.
        manager: writes checkpoints.
        metrics: receives records of checkpoints.
        facts: description of the run, stored in checkpoints.
        lease: lock of the run directory, on rank 0; None on other ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        requests: StopRequests,
        manager: Manager,
        metrics: Metrics,
        facts: Mapping[str, Any],
        lease: Lease | None,
    ) -> None:
        self._comm, self._requests, self._manager = comm, requests, manager
        self._metrics, self._facts, self._lease = metrics, facts, lease
        self._not_before = float("-inf")

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this rank has a stop request, or another job has taken the run directory."""
        is_lost = self._lease is not None and self._lease.is_lost
        return bool(self._requests.reason) or is_lost

    def requested_flags(self, step: int) -> int:
        """Return this rank's flags for the step header: a requested stop or checkpoint. Local."""
        flags = STOP if self.is_asked_to_stop else 0
        may_save = self._comm.rank == 0 and time.monotonic() >= self._not_before
        return flags | (SAVE if may_save and self._manager.due(step) else 0)

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``. Local.

        The result is identical on all ranks if ``checkpoint.every`` is a number of steps.
        """
        return self._manager.due(step)

    def save(self, state: RunState, *, score: float | None = None) -> None:
        """Write a checkpoint and continue; log a warning if the write fails. Collective.

        Args:
            state: state of the run.
            score: score of the model, larger is better; None without a test.

        Raises:
            NotFiniteError: parameters are not finite; on all ranks.
            MismatchError: another job has taken the run directory; on all ranks.
        """
        try:
            self._write(state, wait=False, score=score)
        except CheckpointError as error:
            self._not_before = time.monotonic() + RETRY_S
            if self._comm.rank == 0:
                logger.warning(f"training continues without this checkpoint: {error}")
            return
        figures = self._manager.figures()  # figures of the last finished checkpoint
        last = {} if figures is None else {"last": asdict(figures)}
        self._metrics.write("checkpoint", step=state.step, **last)

    def finish(self, state: RunState, *, score: float | None) -> None:
        """Write the final checkpoint, and wait until it is on disk. Collective.

        Args:
            state: state of the run.
            score: score of the model, larger is better; None if the last test is not finite.

        Raises:
            CheckpointError: the state cannot be written; on all ranks.
            NotFiniteError: parameters are not finite, and nothing was written; on all ranks.
            MismatchError: another job has taken the run directory; on all ranks.
        """
        self._write(state, wait=True, score=score)

    def stop(self, state: RunState) -> str:
        """Write a checkpoint; return the reasons for the stop, as one text. Collective.

        Raises the errors of ``finish``.
        """
        reasons = self._comm.allgather_object(self._requests.reason)
        self._write(state, wait=True, score=None)
        return ", ".join(sorted({reason for reason in reasons if reason}))

    def check_lease(self) -> None:
        """Check that this job still holds the run directory. Collective.

        Raises:
            MismatchError: another job has taken the directory; on all ranks.
        """
        lost = self._lease is not None and not self._lease.is_held(looks=True)
        self._comm.agree(not lost, self._lease.loss() if self._lease is not None else "")

    def _write(self, state: RunState, *, wait: bool, score: float | None) -> None:
        with state.task.exchange.settled():
            self._write_settled(state, wait=wait, score=score)

    def _write_settled(self, state: RunState, *, wait: bool, score: float | None) -> None:
        self.check_lease()
        require_finite_weights(state.task)
        self._metrics.sync()
        state.num_records = self._comm.broadcast_object(self._metrics.num_records)
        try:
            self._manager.save(
                state.shared(),
                step=state.step,
                private=state.own(),
                facts=self._facts,
                wait=wait,
                score=score,
            )
        except CheckpointError:
            self.check_lease()
            raise
