"""Work between two steps: checkpoints are written, and a run that should stop stops."""

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

STOP, SAVE, NOT_FINITE = 1, 2, 4  # bits that ride in the opening message of a step

RETRY_S = 60.0  # after a checkpoint that could not be written, as when a disk is full


class Boundary:
    """Saves and stops between two steps, as the ranks agree in each step.

    A rank may receive a request to stop at any time; the clock of rank 0 decides when a checkpoint
    is due. The message of the step has both, so that no step costs an additional message.
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
        """Keep the arguments; ``facts`` are stored in checkpoints to describe the run.

        ``lease`` is that of the run directory, on the rank that holds it.
        """
        self._comm, self._requests, self._manager = comm, requests, manager
        self._metrics, self._facts, self._lease = metrics, facts, lease
        self._not_before = float("-inf")

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this rank was asked to stop, or has lost the run directory."""
        is_lost = self._lease is not None and self._lease.is_lost
        return bool(self._requests.reason) or is_lost

    def wishes(self, step: int) -> int:
        """Return the bits of this rank for the end of ``step``; not collective."""
        wishes = STOP if self.is_asked_to_stop else 0
        may_save = self._comm.rank == 0 and time.monotonic() >= self._not_before
        return wishes | (SAVE if may_save and self._manager.due(step) else 0)

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``; local.

        The same on every rank where checkpoints are due after a number of steps.
        """
        return self._manager.due(step)

    def save(self, state: RunState, *, score: float | None = None) -> None:
        """Save while training continues; a failed write is a warning. Collective.

        Raises as ``finish``, but for a state that cannot be written.
        """
        try:
            self._write(state, wait=False, score=score)
        except CheckpointError as error:
            self._not_before = time.monotonic() + RETRY_S
            if self._comm.rank == 0:
                logger.warning(f"training goes on without this checkpoint: {error}")
            return
        figures = self._manager.figures()  # of the last one that is on disk
        last = {} if figures is None else {"last": asdict(figures)}
        self._metrics.write("checkpoint", step=state.step, **last)

    def finish(self, state: RunState, *, score: float | None) -> None:
        """Save the result of the run, unless it is saved. Collective.

        Raises ``CheckpointError``: the state cannot be written; on every rank. ``NotFiniteError``:
        the parameters are not finite, and nothing was written; on every rank. ``MismatchError``:
        another job has taken the run directory; on every rank.
        """
        self._write(state, wait=True, score=score)

    def stop(self, state: RunState) -> str:
        """Save, and return the reasons of the stop. Collective; raises as ``finish``."""
        reasons = self._comm.allgather_object(self._requests.reason)
        self._write(state, wait=True, score=None)
        return ", ".join(sorted({reason for reason in reasons if reason}))

    def check_lease(self) -> None:
        """Return if the run directory is still of this job. Collective.

        Raises ``MismatchError``: another job has taken it; on every rank.
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
