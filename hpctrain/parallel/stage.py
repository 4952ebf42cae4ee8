"""Stages of a pipeline, and the torch schedules that run them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import as_own_tensor, without_outputs
from hpctrain.parallel.recomputation import selective_in
from hpctrain.parallel.split import left_as_they_are

SCHEDULES = {
    "gpipe": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
    "zero_bubble": (schedules.ScheduleInterleavedZeroBubble, 2),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2),
}
"""By name: class of torch, and default number of stages per rank."""

TWO_HALVES = ("zero_bubble", "zbv")
"""Schedules that split backward: first gradients of inputs, later gradients of weights."""


class Stage(PipelineStage):
    """Pipeline stage that measures its compute time and counts micro-batches in flight."""

    in_flight = most_in_flight = 0
    halves = False  # whether the schedule splits backward; see ``TWO_HALVES``

    def reset(self) -> None:
        """Clear times and counts before a step."""
        self.seconds: dict[str, list[float]] = {}
        self.in_flight = self.most_in_flight = 0

    @property
    def busy_s(self) -> float:
        """Seconds of computation over all micro-batches of the last step."""
        return sum(map(sum, self.seconds.values()))

    @contextmanager
    def _busy(self, what: str) -> Any:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.setdefault(what, []).append(time.perf_counter() - start)

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        # Torch before 2.13 determines shapes only once; clearing the shapes makes torch determine
        # them again. It runs a forward for this, for which DDP would average gradients.
        self.inputs_meta = self._outputs_meta = None
        inner = self.submod
        quiet = inner.no_sync() if isinstance(inner, DistributedDataParallel) else nullcontext()
        with quiet, left_as_they_are([inner], self.device):
            return super()._prepare_forward_infra(*args, **options)

    def _compute_outputs(self, *args: Any, **options: Any) -> Any:
        return self._divisible(super()._compute_outputs(*args, **options))

    def forward_maybe_with_nosync(self, *args: Any, **options: Any) -> Any:
        """Run the forward; return an output that a schedule with split backward can use."""
        return self._divisible(super().forward_maybe_with_nosync(*args, **options))  # type: ignore[no-untyped-call]

    def _divisible(self, out: Any) -> Any:
        """Return ``out`` so that torch can use it in a schedule with split backward.

        With these schedules, torch detaches the output in place, which is not possible for views,
        and searches for weights in the graph from outputs to inputs, which is empty after frozen
        layers. The result is therefore not a view, and requires a gradient.
        """
        if self.halves and torch.is_grad_enabled() and out.is_floating_point():
            return as_own_tensor(out).requires_grad_()
        return out

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Return no operations, since torch before 2.13 sends 8 bytes here but receives 4."""
        return []

    # Torch passes gradients between the stages of one rank even if no gradients exist; the two
    # overrides below prevent an error.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients of the inputs, for the previous stage on the same rank."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Store the gradients of the outputs, from the next stage on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Run the forward of a micro-batch, and count the micro-batch as in flight."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        with self._busy("forward"):
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Run the backward of a micro-batch; with split backward, only for gradients of inputs."""
        with self._busy("backward"):
            found = super().backward_one_chunk(*args, **options)
        self.in_flight -= 1
        return found

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Compute the gradients of weights that a split backward has deferred."""
        with self._busy("weights"):
            return super().backward_weight_one_chunk(*args, **options)


class PipelineSchedule:
    """Order in which the stages of a pipeline process micro-batches.

    Args:
        name: one of ``SCHEDULES``.
        size: number of ranks.
        stages_per_rank: number of stages of each rank; None for the default of the schedule.
        num_microbatches: number of equal parts of a batch.
        model: model that is divided, to check for selective recomputation.

    Raises:
        ConfigError: ``name`` is unknown, the schedule requires another number of stages or
            micro-batches, or the schedule splits backward and the model has selective
            recomputation.
    """

    def __init__(
        self,
        name: str,
        size: int,
        stages_per_rank: int | None,
        num_microbatches: int,
        model: nn.Module,
    ) -> None:
        self._make, per_rank = checked(name, stages_per_rank, model)
        check_microbatches(num_microbatches, size, name)
        self.rank_of = [rank_of_stage(stage, size, name) for stage in range(per_rank * size)]
        """Rank of each stage."""
        self.num_microbatches = num_microbatches
        self._halves = name in TWO_HALVES
        self._runs: dict[str, Any] = {}

    def make_stages(
        self, modules: Mapping[int, nn.Module], device: torch.device, group: Any
    ) -> list[Stage]:
        """Return the stages of this rank, given their modules by index of the stage."""
        total = len(self.rank_of)
        stages = [Stage(one, n, total, device, group=group) for n, one in modules.items()]
        for stage in stages:
            stage.halves = self._halves
        return stages

    def prepare(self, stages: Sequence[Stage], loss: Callable[..., Any]) -> None:
        """Rebuild the schedule, so that torch exchanges shapes again in the next run.

        Called after the stages, the shapes of inputs or ``requires_grad`` have changed.
        """
        given: Any = stages if len(stages) > 1 else stages[0]

        # The option scale_grads would also divide the accumulated gradients of earlier batches.
        def mean(output: Any, target: Any) -> Any:
            return loss(output, target) / self.num_microbatches

        made = self._make(given, self.num_microbatches, loss_fn=mean, scale_grads=False)
        runs = {"step": made.step, "eval": made.eval}
        self._runs = {what: partial(run, **without_outputs(run)) for what, run in runs.items()}

    def run(self, what: str, *inputs: Any, **options: Any) -> None:
        """Run a batch through the stages; ``what`` is ``step`` or ``eval``. Collective."""
        self._runs[what](*inputs, **options)


def checked(schedule: str, given: int | None, model: nn.Module) -> tuple[Any, int]:
    """Return torch's schedule class and the number of stages per rank.

    Raises:
        ConfigError: the schedule is unknown, or does not support the model or ``given`` stages.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if schedule in TWO_HALVES and (named := selective_in(model)):
        raise ConfigError(
            f"selective recomputation must not be used with {' or '.join(TWO_HALVES)}, "
            f"which divide a backward in two, got {', '.join(named[:3])} and the schedule "
            f"{schedule}; recompute all operations, or use the schedule interleaved"
        )
    make, usual = SCHEDULES[schedule]
    per_rank = usual if given is None else given
    more = " or more" if schedule in ("interleaved", "zero_bubble") else ""
    if per_rank != usual and (per_rank < 2 or not more):
        raise ConfigError(
            f"stages_per_rank must be {usual}{more} with the schedule {schedule}, got {per_rank}; "
            f"omit stages_per_rank, or use another schedule"
        )
    return make, per_rank


def check_microbatches(number: int, size: int, schedule: str) -> None:
    """Raise ``ConfigError`` unless the schedule supports this number of micro-batches."""
    least, rounds = size if schedule == "1f1b" else 1, max(1, number // size)
    if number < least:
        raise ConfigError(
            f"{schedule} on {size} ranks must have at least {least} micro-batches, got "
            f"{number}; use more micro-batches, or the schedule gpipe"
        )
    if schedule in ("interleaved", "zero_bubble") and number % rounds:
        raise ConfigError(
            f"the micro-batches of {schedule} on {size} ranks must divide into {rounds} "
            f"equal rounds, got {number}; use {rounds * size}"
        )


def rank_of_stage(stage: int, size: int, schedule: str) -> int:
    """Return the rank of a stage: round robin, or with ``zbv`` in reverse order after ``size``."""
    there = stage % size
    return size - 1 - there if schedule == "zbv" and stage >= size else there
