"""Meter of steps since the last record: sums over steps, then over ranks."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch

from hpctrain.comm.communicator import Communicator

T = TypeVar("T")

_TIMES = ("compute_s", "communication_s", "input_s")
_CHECKPOINT = 6  # where the sums have that time


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Some steps, as all ranks together saw them; times are means over steps and ranks."""

    num_steps: int
    num_samples: int  # of all ranks
    loss: float  # mean over the samples; NaN of nothing, where all steps were left out
    compute_s: float
    communication_s: float  # only what computing did not hide
    input_s: float
    num_skipped: int = 0
    """Steps that were left out; what ranks take together is one, their own are one of each."""
    of_ranks: Mapping[str, list[float]] = field(default_factory=dict)
    """These times by rank, and those of checkpoints, as means over the steps."""

    @property
    def step_s(self) -> float:
        """Duration of a step."""
        return self.compute_s + self.communication_s + self.input_s

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return self.num_samples / (self.num_steps * self.step_s)

    @property
    def communication_share(self) -> float:
        """Part of a step that is exposed communication, 0 to 1."""
        return self.communication_s / self.step_s

    def joined(self, later: "Interval") -> "Interval":
        """Return this and a later interval as one."""
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
    """Adds up this rank's steps until ``take`` sums them over all ranks."""

    def __init__(self) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64)
        self._num_steps = 0
        self.input_s = 0.0
        """How long the last batch let us wait."""

    @property
    def num_steps(self) -> int:
        """Steps since the last ``take``, the same on every rank."""
        return self._num_steps

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has added since the last ``take``."""
        return {"sums": self._sums.clone(), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        sums = state["sums"]  # fewer in older checkpoints
        self._sums.zero_()[: len(sums)] = sums
        self._num_steps = state["num_steps"]

    def shared(self, comm: Communicator) -> dict[str, Any]:
        """Return what all ranks have added since the last ``take``, as of one; collective."""
        sums = self._sums.clone()
        comm.allreduce_(sums).wait()
        sums[[2, 3, 4, _CHECKPOINT]] /= comm.size
        return {"sums": sums, "num_steps": self._num_steps}

    def load_shared(self, state: Mapping[str, Any], rank: int) -> None:
        """Go on from a state of another number of ranks: rank 0 has the samples of all."""
        self.load_state_dict(state)
        if rank:
            self._sums[:2] = self._sums[5] = 0.0

    def inputs(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield ``batches`` and note how long each let us wait."""
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
        """Add one step; ``work_s`` is all its time but the wait for its batch."""
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
        """Add time in which training waited for a checkpoint."""
        self._sums[_CHECKPOINT] += seconds

    def take(self, comm: Communicator) -> Interval:
        """Return what was added on all ranks since the last call; collective."""
        # A row for each rank in one small sum: as many messages as the sums of all would take.
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
