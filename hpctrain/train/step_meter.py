"""Sums of losses, times, sample counts and traffic over the steps since the last record."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import Traffic
from hpctrain.train.task import Task

T = TypeVar("T")

_TIMES = ("compute_s", "communication_s", "input_s")
_CHECKPOINT = 6  # index of the checkpoint time in the sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Measurements of several steps; times are means over steps and ranks, in seconds."""

    num_steps: int
    num_samples: int  # samples of all ranks
    loss: float  # mean over the samples; NaN if all steps were skipped
    compute_s: float
    communication_s: float  # not overlapped with compute
    input_s: float
    num_skipped: int = 0
    """Number of skipped steps: a step of all ranks counts once, a local step once per rank."""
    of_ranks: Mapping[str, list[float]] = field(default_factory=dict)
    """The same times and ``checkpoint_s`` by name: a list with the mean of each rank."""

    @property
    def step_s(self) -> float:
        """Duration of a step in seconds."""
        return self.compute_s + self.communication_s + self.input_s

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks in samples per second."""
        return self.num_samples / (self.num_steps * self.step_s)

    @property
    def communication_share(self) -> float:
        """Fraction of a step that is exposed communication, 0 to 1."""
        return self.communication_s / self.step_s

    def joined(self, later: "Interval") -> "Interval":
        """Return this and a later interval as one interval, without ``of_ranks``."""
        both = (self, later)
        num_steps, num_samples, num_skipped = (
            sum(getattr(each, name) for each in both)
            for name in ("num_steps", "num_samples", "num_skipped")
        )
        learnt = sum(each.loss * each.num_samples for each in both if each.num_samples)
        times = {
            name: sum(getattr(each, name) * each.num_steps for each in both) / num_steps
            for name in _TIMES
        }
        return Interval(
            num_steps=num_steps,
            num_samples=num_samples,
            loss=learnt / num_samples if num_samples else math.nan,
            num_skipped=num_skipped,
            **times,
        )


class StepMeter:
    """Sums measurements of this rank's steps until ``take`` reduces them over all ranks."""

    def __init__(self) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64)
        self._num_steps = 0
        self.input_s = 0.0
        """Seconds that this rank waited for the last batch."""

    @property
    def num_steps(self) -> int:
        """Steps since the last ``take``; identical on all ranks."""
        return self._num_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this rank since the last ``take``."""
        return {"sums": self._sums.clone(), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        sums = state["sums"]  # older checkpoints have fewer sums
        self._sums.zero_()[: len(sums)] = sums
        self._num_steps = state["num_steps"]

    def shared(self, comm: Communicator) -> dict[str, Any]:
        """Return the sums over ranks since the last ``take``; times are means over the ranks.

        Collective.
        """
        sums = self._sums.clone()
        comm.allreduce_(sums).wait()
        sums[[2, 3, 4, _CHECKPOINT]] /= comm.size
        return {"sums": sums, "num_steps": self._num_steps}

    def load_shared(self, state: Mapping[str, Any], rank: int) -> None:
        """Continue from a ``shared()`` of any number of ranks.

        Only rank 0 gets the sums of losses, samples and skipped steps; all ranks get the times.
        """
        self.load_state_dict(state)
        if rank:
            self._sums[:2] = self._sums[5] = 0.0

    def inputs(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield ``batches``, measuring the wait for each batch."""
        iterator = iter(batches)
        while True:
            start = perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.input_s = perf_counter() - start
            yield batch

    def add(
        self,
        *,
        loss: float,
        num_samples: int,
        work_s: float,
        communication_s: float,
        num_skipped: int = 0,
    ) -> None:
        """Add one step. Local.

        Args:
            loss: mean over ``num_samples``.
            num_samples: samples of this rank.
            work_s: duration of the step, without the wait for the batch.
            communication_s: time within ``work_s`` that the step waited for communication.
            num_skipped: steps to count as skipped.
        """
        self._sums += torch.tensor(
            (
                loss * num_samples,
                num_samples,
                work_s - communication_s,
                communication_s,
                self.input_s,
                num_skipped,
                0.0,
            ),
            dtype=torch.float64,
        )
        self._num_steps += 1

    def add_checkpoint(self, seconds: float) -> None:
        """Add seconds that training waited for a checkpoint."""
        self._sums[_CHECKPOINT] += seconds

    def take(self, comm: Communicator) -> Interval:
        """Return the measurements of all ranks since the last call. Collective."""
        # Each rank fills its own row, so one allreduce gives all ranks the rows of all ranks.
        rows = torch.zeros(comm.size, len(self._sums), dtype=torch.float64)
        rows[comm.rank] = self._sums
        comm.allreduce_(rows).wait()
        loss, num_samples, *_, num_skipped, _ = rows.sum(dim=0).tolist()
        checkpoint_s = (rows[:, _CHECKPOINT] / self._num_steps).tolist()
        times = dict(zip(_TIMES, (rows[:, 2:5].T / self._num_steps).tolist(), strict=True))
        interval = Interval(
            num_steps=self._num_steps,
            num_samples=int(num_samples),
            loss=loss / num_samples if num_samples else math.nan,
            **{name: sum(of_ranks) / comm.size for name, of_ranks in times.items()},
            num_skipped=int(num_skipped),
            of_ranks={**times, "checkpoint_s": checkpoint_s},
        )
        self._sums.zero_()
        self._num_steps = 0
        return interval


class SavingsMeter:
    """Sums the traffic of steps with compression, until ``take`` reduces it over the ranks."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._clear()

    def _clear(self) -> None:
        self._node_bytes = self._rail_bytes = self._num_steps = 0
        self._began_s = now.rail_s if (now := self._task.exchange.savings) else 0.0

    def add(self, moved: Traffic) -> None:
        """Add the traffic of one step. Local."""
        self._node_bytes += moved.node_bytes
        self._rail_bytes += moved.rail_bytes
        self._num_steps += 1

    def take(self) -> dict[str, Any]:
        """Return means per step since the last call. Collective.

        Returns:
            ``node_bytes`` and ``rail_bytes``: bytes that all ranks moved within and between
            nodes; ``ratio``: bytes between nodes without a codec, divided by ``rail_bytes``;
            ``won_s``: seconds saved, None if the link was not measured. Empty without
            compression.
        """
        now = self._task.exchange.savings
        if now is None:
            return {}
        comm, num_steps = self._task.comm, max(self._num_steps, 1)
        rows = torch.zeros(comm.size, 3, dtype=torch.float64)
        row = (self._node_bytes, self._rail_bytes, now.rail_s - self._began_s)
        rows[comm.rank] = torch.tensor(row, dtype=torch.float64) / num_steps
        self._clear()
        comm.allreduce_(rows).wait()
        # The last rank to arrive does not wait, so the minimum excludes waiting for other ranks.
        busy_s = min((s for s in rows[:, 2].tolist() if s), default=0.0)
        node_bytes, rail_bytes, _ = rows.sum(dim=0).tolist()
        return {
            "node_bytes": round(node_bytes),
            "rail_bytes": round(rail_bytes),
            "ratio": now.plain_bytes / rail_bytes if now.plain_bytes else 1.0,
            "won_s": None if now.plain_s is None else now.plain_s - busy_s,
        }
