"""A pipeline of torch: stages cut by measured time, tied weights, clipping, and its bubble."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

from hpctrain.core.errors import ConfigError
from hpctrain.parallel.split import Chain, cut, layers_of, seconds_of, shared_between, total_of

SCHEDULES = {
    "gpipe": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
    "zero_bubble": (schedules.ScheduleInterleavedZeroBubble, 2),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2),
}
"""Torch's schedule, and stages of each rank."""

Loss = Callable[[Tensor, Tensor], Tensor]
Wrap = Callable[[nn.Module], nn.Module]


class _Stage(PipelineStage):
    """A stage that knows how long it has calculated, and how many micro-batches wait in it."""

    busy_s = 0.0
    in_flight = most_in_flight = 0

    def reset(self) -> None:
        self.busy_s, self.in_flight, self.most_in_flight = 0.0, 0, 0

    @contextmanager
    def _busy(self) -> Any:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.busy_s += time.perf_counter() - start

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        with self._busy():
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._busy():
            found = super().backward_one_chunk(*args, **options)
        self.in_flight -= 1
        return found

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self._busy():
            return super().backward_weight_one_chunk(*args, **options)


class Pipeline:
    """The stages that this rank has of a model that is cut along its layers.

    ``model`` holds the layers of this rank under the names that they have in the whole model, for
    the optimizer and for distributed checkpoints: ``AdamW(pipeline.model.parameters())``. The
    whole model is not kept; let go of it.

    Source: Huang et al. 2019, arXiv:1811.06965 (GPipe); Narayanan et al. 2021, arXiv:2104.04473
    (1F1B, interleaved); Qi et al. 2024, arXiv:2401.10241 (zero bubble).
    """

    def __init__(  # noqa: PLR0913 - what a pipeline is made of; all but the first three by name
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        layers: Sequence[str],
        *,
        loss: Loss,
        num_microbatches: int,
        schedule: str = "1f1b",
        sample: Tensor | None = None,
        wrap: Wrap | None = None,
    ) -> None:
        """Cut a model into stages. Collective over all ranks.

        Args:
            model: the same on all ranks.
            mesh: one axis, such as ``build_mesh(pp=2)["pp"]``.
            layers: names of the modules whose chain the model is, in the order of forward, in
                which ``*`` stands for any part: ``["embedding", "blocks.*", "head"]``.
            loss: mean loss of the last layer's output and the target of a micro-batch.
            num_microbatches: into how many equal parts a batch is cut.
            schedule: ``gpipe``, ``1f1b``, or, with two stages on each rank, ``interleaved``,
                ``zero_bubble`` and ``zbv``.
            sample: a micro-batch, by which the layers are timed, so that the slowest stage is as
                fast as can be; without it they count by their parameters.
            wrap: applied to each stage, such as ``fully_shard`` over ``mesh["dp"]``.

        Raises:
            ConfigError: there is no such schedule or layer, there are more stages than layers, or
                a parameter is in no layer.
        """
        if schedule not in SCHEDULES:
            raise ConfigError(f"schedule is one of {', '.join(SCHEDULES)}, got {schedule!r}")
        kind, per_rank = SCHEDULES[schedule]
        chain = layers_of(model, layers)
        self._mesh, self._group, self._size = mesh, mesh.get_group(), mesh.size()
        number, total = mesh.get_local_rank(), per_rank * self._size
        costs = _agreed_costs([layer for _, layer in chain], sample)
        self.split = cut(costs, total)
        """Layers of each stage, by their numbers."""
        chains = [Chain(chain[part.start : part.stop]) for part in self.split]
        rank_of = [_rank_of(stage, self._size, schedule) for stage in range(total)]
        mine = [stage for stage in range(total) if rank_of[stage] == number]
        self._last_rank = rank_of[-1]
        self._has_first, self._has_last = 0 in mine, total - 1 in mine
        self._num_microbatches = num_microbatches
        self.model = Chain([layer for stage in mine for layer in chain[_slice(self.split[stage])]])
        self._tie(shared_between(chains), rank_of, number)
        device = next(model.parameters()).device
        self._stages = [
            _Stage((wrap or _as_it_is)(chains[stage]), stage, total, device, group=self._group)
            for stage in mine
        ]
        given: Any = self._stages if per_rank > 1 else self._stages[0]
        # Not by torch, which would divide what earlier batches have left, too.
        share = lambda out, target: loss(out, target) / num_microbatches  # noqa: E731
        self._schedule = kind(given, num_microbatches, loss_fn=share, scale_grads=False)
        self._seconds = 0.0

    def _tie(
        self, shared: Sequence[Sequence[tuple[int, str]]], rank_of: Sequence[int], number: int
    ) -> None:
        """Find the weights that stages of several ranks have. Collective over them."""
        self._tied: list[tuple[str, Any]] = []
        self._counted_elsewhere: set[str] = set()
        ranks = dist.get_process_group_ranks(self._group)
        for places in shared:
            name_on = {rank_of[stage]: name for stage, name in reversed(places)}
            if number not in name_on or len(name_on) == 1:
                continue
            members = sorted(ranks[rank] for rank in name_on)
            group = dist.new_group(members, use_local_synchronization=True)
            self._tied.append((name_on[number], group))
            if number != min(name_on):
                self._counted_elsewhere.add(name_on[number])

    def step(self, given: Tensor, target: Tensor) -> Tensor:
        """Calculate gradients of a batch, which add to those there are. Collective over the axis.

        All ranks of the axis give the same batch; gradients of tied weights are summed. With
        tensor parallel scores, call it within ``loss_parallel()``.

        Args:
            given: ``(n, ...)``, what the first layer takes; ``n`` is a multiple of
                ``num_microbatches``.
            target: ``(n, ...)``, what the loss takes.

        Returns:
            The mean loss, on every rank.

        Raises:
            ConfigError: the micro-batches do not divide the batch.
        """
        kept = self._take_tied_gradients()
        loss = self._run(self._schedule.step, given, target)
        self._sum_tied_gradients(kept)
        return loss

    def evaluate(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch, without gradients. Collective over the axis.

        What is given, returned and raised is that of ``step``.
        """
        with torch.no_grad():
            return self._run(self._schedule.eval, given, target)

    def _run(self, call: Callable[..., object], given: Tensor, target: Tensor) -> Tensor:
        if len(given) % self._num_microbatches:
            raise ConfigError(
                f"{self._num_microbatches} micro-batches must divide a batch, got {len(given)} "
                f"samples; take a multiple"
            )
        for stage in self._stages:
            stage.reset()
        losses: list[Tensor] = []
        inputs = (given,) if self._has_first else ()
        start = time.perf_counter()
        told = target if self._has_last else None
        call(*inputs, target=told, losses=losses, return_outputs=False)
        self._seconds = time.perf_counter() - start
        mean = torch.zeros((), dtype=torch.float64)
        if losses:
            mean = torch.stack([_whole(loss.detach()) for loss in losses]).sum().to(mean)
        source = dist.get_process_group_ranks(self._group)[self._last_rank]
        dist.broadcast(mean, source, group=self._group)
        return mean

    def _take_tied_gradients(self) -> list[Tensor | None]:
        """Set aside what earlier steps have summed already."""
        kept = []
        for name, _ in self._tied:
            parameter = self.model.get_parameter(name)
            kept.append(parameter.grad)
            parameter.grad = None
        return kept

    def _sum_tied_gradients(self, kept: Sequence[Tensor | None]) -> None:
        for (name, group), before in zip(self._tied, kept, strict=True):
            parameter = self.model.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(_local(parameter.grad), group=group)
            if before is not None:
                parameter.grad += before

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages so that their norm is ``max_norm`` at most.

        Collective over the axis. Tied weights count once.

        Returns:
            The norm before, on every rank.
        """
        named = self.model.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        total = total_of([g for n, g in gradients.items() if n not in self._counted_elsewhere])
        dist.all_reduce(total, group=self._group)
        norm = total.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    @property
    def most_in_flight(self) -> int:
        """Micro-batches whose activations this rank held at once in the last step."""
        return sum(stage.most_in_flight for stage in self._stages)

    def report(self) -> str:
        """Say where the time of the last step went. Collective over the axis.

        Returns:
            The bubble, which is the share of the step in which ranks wait for each other, beside
            that of equal stages, ``(P - 1) / (M + P - 1)``; and the slowest rank, on every rank.
        """
        found: list[Any] = [None] * self._size
        mine = sum(stage.busy_s for stage in self._stages)
        dist.all_gather_object(found, (mine, self._seconds), group=self._group)
        busy = [seconds for seconds, _ in found]
        # Ranks leave a step one after the other: the last one says how long it took.
        bubble = 1 - sum(busy) / (self._size * max(seconds for _, seconds in found))
        ideal = (self._size - 1) / (self._num_microbatches + self._size - 1)
        ratio = max(busy) / max(statistics.median(busy), 1e-9)
        return (
            f"bubble {bubble:.3f}, (P - 1) / (M + P - 1) is {ideal:.3f}; rank "
            f"{busy.index(max(busy))} of the pipeline is slowest, {ratio:.2f} times the median"
        )


def _agreed_costs(layers: Sequence[nn.Module], sample: Tensor | None) -> list[float]:
    """Return what each layer costs, the mean of what all ranks have measured. Collective."""
    if sample is None:
        return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seconds_of(layers, sample))
    return [statistics.mean(times) for times in zip(*found, strict=True)]


def _rank_of(stage: int, size: int, schedule: str) -> int:
    """Return which rank has a stage: in turn, or there and back."""
    there = stage % size
    return size - 1 - there if schedule == "zbv" and stage >= size else there


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
