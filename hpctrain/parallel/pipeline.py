"""A pipeline of torch: stages cut by measured time, tied weights, clipping, and its bubble."""

import socket
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import can_pipeline, require, without_outputs
from hpctrain.parallel.dtensor import local, norm_of, whole
from hpctrain.parallel.guard import EVALUATION, FORWARD, guarded, release
from hpctrain.parallel.mesh import require_one_axis
from hpctrain.parallel.mesh_agreement import digest, gathered, require_identical, signature_of
from hpctrain.parallel.split import Chain, cut, layers_of, seconds_of, shared_between
from hpctrain.parallel.stage import (
    TWO_HALVES,
    Stage,
    check_microbatches,
    checked,
    rank_of_stage,
)

SAME = "make the same on every rank"
Loss = Callable[[Tensor, Tensor], Tensor]
Wrap = Callable[[nn.Module], nn.Module]


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
        stages_per_rank: int | None = None,
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
            num_microbatches: into how many equal parts a batch is cut; by ``1f1b`` at least as
                many as there are ranks.
            schedule: ``gpipe``, ``1f1b``, or, with two stages on each rank, ``interleaved``,
                ``zero_bubble`` and ``zbv``.
            stages_per_rank: for ``interleaved`` and ``zero_bubble``, whose M micro-batches are a
                multiple of the whole part of M / P, such as a multiple of P.
            sample: a micro-batch, by which the layers are timed, so that the slowest stage is as
                fast as can be; without it they count by their parameters.
            wrap: applied to each stage, such as ``fully_shard`` over ``mesh["dp"]``.

        Raises:
            ConfigError: there is no such schedule or layer, the schedule has another number of
                stages or micro-batches, there are more stages than layers, a parameter is in no
                layer, or something is computed again selectively where the schedule cuts backward
                in two.
            MismatchError: the ranks ask for different pipelines; on every rank of the axis.
        """
        require_one_axis(mesh, "pp")
        require("a pipeline", can_pipeline, "2.7")
        self._mesh, self._group, self._size = mesh, mesh.get_group(), mesh.size()
        asked = f"{schedule=}, {num_microbatches=}, {stages_per_rank=}, layers={[*layers]}"
        first = f"sample {None if sample is None else (tuple(sample.shape), sample.dtype)}"
        require_identical(mesh, [asked, first, *signature_of(model)], "a pipeline", SAME)
        self._make, per_rank = checked(schedule, stages_per_rank, model)
        chain, total = layers_of(model, layers), per_rank * self._size
        check_microbatches(num_microbatches, self._size, schedule)
        self._halves = schedule in TWO_HALVES
        self._rank_of = [rank_of_stage(stage, self._size, schedule) for stage in range(total)]
        costs = _agreed_costs([layer for _, layer in chain], sample)
        self.split = cut(costs, total)
        """Layers of each stage, by their numbers."""
        self._loss, self._num_microbatches = loss, num_microbatches
        self._wrap = wrap or (lambda stage: stage)
        self._device = next(model.parameters()).device
        self._shared, self._groups = shared_between(chain), dict[tuple[int, ...], Any]()
        release(model)
        self.model = Chain([])
        self._guard = guarded(self.model, stages=mesh, shared=self._shared_weights)
        self._place({n: chain[n] for stage in self._mine() for n in self.split[stage]})

    def _mine(self) -> list[int]:
        """Return the stages of this rank."""
        number = self._mesh.get_local_rank()
        return [stage for stage, rank in enumerate(self._rank_of) if rank == number]

    def _place(self, layers: Mapping[int, tuple[str, nn.Module]]) -> None:
        """Make the stages of this rank from its layers. Collective over all ranks."""
        total, mine = len(self._rank_of), self._mine()
        self.model.fill([layers[number] for number in sorted(layers)])
        self._tie()
        self._chains = [Chain([layers[number] for number in self.split[stage]]) for stage in mine]
        wrapped = [self._wrap(chain) for chain in self._chains]
        self._stages = [
            Stage(one, stage, total, self._device, group=self._group)
            for stage, one in zip(mine, wrapped, strict=True)
        ]
        self._watch(wrapped)
        for stage_of_rank in self._stages:
            stage_of_rank.halves = self._halves
        self._seconds = 0.0
        self._learnt: object = None

    def _watch(self, wrapped: Sequence[nn.Module]) -> None:
        """Let one guard compare what ranks do with all stages, and with replicas of them."""
        guard = self._guard
        for chain in self._chains:
            guard.num_flags = max(guard.num_flags, release(chain))
            chain._guard = guard  # type: ignore[assignment]  # noqa: SLF001
        groups = {one.process_group for one in wrapped if isinstance(one, DistributedDataParallel)}
        guard.replicas = [(group, self._device.type, False) for group in groups]
        guard.refresh()

    def _shared_weights(self) -> list[tuple[str, nn.Parameter | None]]:
        """Return the weights of several stages, by one of their names, and those that are here."""
        here = dict(self.model.named_parameters(remove_duplicate=False))
        tied = dict(self._tied)
        return [
            (places[0][1], next((here[name] for _, name in places if name in tied), None))
            for places in self._shared
        ]

    def _learn(self) -> None:
        """Let torch ask anew what stages hand on, and who trains. Collective over the axis.

        Raises ``ConfigError``: a weight of several stages is trained by some; on every rank.
        """
        named = self.model.named_parameters(remove_duplicate=False)
        found = gathered({name: p.requires_grad for name, p in named}, self._mesh)
        trained = {name: trains for of_rank in found for name, trains in of_rank.items()}
        self._guard.do_all_step = all(any(of_rank.values()) for of_rank in found)
        for places in self._shared:
            if len({trained[name] for _, name in places}) > 1:
                words = (f"{name} {('frozen', 'trained')[trained[name]]}" for _, name in places)
                raise ConfigError(
                    f"a weight of several stages is trained by all or by none, got "
                    f"{', '.join(words)}; set requires_grad alike"
                )
        given: Any = self._stages if len(self._stages) > 1 else self._stages[0]
        # Not by torch, which would divide what earlier batches have left, too.
        num, loss = self._num_microbatches, self._loss
        share = lambda out, target: loss(out, target) / num  # noqa: E731
        schedule = self._make(given, num, loss_fn=share, scale_grads=False)
        runs = {"step": schedule.step, "eval": schedule.eval}
        self._runs = {what: partial(run, **without_outputs(run)) for what, run in runs.items()}

    def _tie(self) -> None:
        """Find the weights that stages of several ranks have. Collective over them."""
        self._tied: list[tuple[str, Any]] = []
        self._counted_elsewhere: set[str] = set()
        ranks, mine = dist.get_process_group_ranks(self._group), self._mesh.get_local_rank()
        rank_of = self._ranks_of_layers(self.split)
        for places in self._shared:
            name_on = {rank_of[layer]: name for layer, name in reversed(places)}
            if mine not in name_on or len(name_on) == 1:
                continue
            members = tuple(sorted(ranks[rank] for rank in name_on))
            if members not in self._groups:
                made = dist.new_group([*members], use_local_synchronization=True)
                self._groups[members] = made
            self._tied.append((name_on[mine], self._groups[members]))
            if mine != min(name_on):
                self._counted_elsewhere.add(name_on[mine])

    def _ranks_of_layers(self, split: Sequence[range]) -> dict[int, int]:
        return {
            layer: rank for rank, part in zip(self._rank_of, split, strict=True) for layer in part
        }

    def step(self, given: Tensor, target: Tensor) -> Tensor:
        """Calculate gradients of a batch, which add to those there are. Collective over the axis.

        All ranks of the axis give the same batch; gradients of tied weights are summed. Between
        two steps batches may change their size, and parameters their ``requires_grad``. With
        tensor parallel scores, call it within ``loss_parallel()``.

        Args:
            given: ``(n, ...)``, what the first layer takes; ``n`` is a multiple of
                ``num_microbatches``.
            target: ``(n, ...)``, what the loss takes.

        Returns:
            The mean loss, on every rank.

        Raises:
            ConfigError: the micro-batches do not divide the batch, it has not as many targets, or
                a weight of several stages is frozen in some; on every rank of the axis.
            MismatchError: the ranks give different batches, or differ in what they have done to
                gradients, weights and settings since; on every rank of the axis.
        """
        self._check_batch(given, target, FORWARD)
        kept = self._take_tied_gradients()
        loss = self._run("step", given, target)
        self._sum_tied_gradients(kept)
        self._guard.mark()
        return loss

    def evaluate(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch, without gradients. Collective over the axis.

        What is given, returned and raised is that of ``step``.
        """
        self._check_batch(given, target, EVALUATION)
        with torch.no_grad():
            return self._run("eval", given, target)

    def _run(self, what: str, given: Tensor, target: Tensor) -> Tensor:
        for stage in self._stages:
            stage.reset()
        losses: list[Tensor] = []
        # Torch before 2.13 compares strides with those of a copy.
        inputs = (given.contiguous(),) if self._stages[0].is_first else ()
        told = target if self._stages[-1].is_last else None
        start = time.perf_counter()
        self._runs[what](*inputs, target=told, losses=losses)
        self._seconds = time.perf_counter() - start
        mean = torch.zeros((), dtype=torch.float64)
        if losses:
            mean = torch.stack([whole(loss.detach()) for loss in losses]).sum().to(mean)
        source = dist.get_process_group_ranks(self._group)[self._rank_of[-1]]
        dist.broadcast(mean, source, group=self._group)
        return mean

    def _check_batch(self, given: Tensor, target: Tensor, what: int) -> None:
        """Raise on all ranks of the axis, or on none. Collective over it."""
        lines = [f"given {digest(given)}", f"target {digest(target)}"]
        mine = zlib.crc32("".join(lines).encode())
        trained = tuple(parameter.requires_grad for parameter in self.model.parameters())
        now = tuple(given.shape), given.dtype, tuple(target.shape), trained
        is_new, differs = self._guard.compare(what, batch=mine, is_new=now != self._learnt)
        if differs:
            way_out = "divide data among the ranks of dp alone"
            require_identical(self._mesh, lines, "a batch of a pipeline", way_out)
        if len(given) != len(target):
            raise ConfigError(
                f"a batch has a target for each sample, got {len(given)} samples and "
                f"{len(target)} targets; give as many"
            )
        if len(given) % self._num_microbatches:
            raise ConfigError(
                f"{self._num_microbatches} micro-batches must divide a batch, got {len(given)} "
                f"samples; take a multiple"
            )
        if is_new:
            self._learn()
            self._learnt = now

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
            if not parameter.requires_grad:  # nor is it on other ranks
                parameter.grad = before
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)
            if before is not None:
                parameter.grad += before

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages so that their norm is ``max_norm`` at most.

        Collective over the axis. Tied weights count once.

        Returns:
            The norm before, on every rank.
        """
        named = self.model.named_parameters()
        mine = (p.grad for name, p in named if name not in self._counted_elsewhere)
        norm = norm_of(gradient for gradient in mine if gradient is not None)
        total = norm.to("cpu", torch.float64).square()
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

        Raises ``ConfigError``: there was no step yet.
        """
        if not self._seconds:
            raise ConfigError("a report is of the last step, got none; call step before it")
        mine = sum(stage.busy_s for stage in self._stages)
        here = dist.get_rank(), socket.gethostname()
        found = gathered((mine, self._seconds, here), self._mesh)
        busy = [seconds for seconds, _, _ in found]
        # Ranks leave a step one after the other: the last one says how long it took.
        bubble = 1 - sum(busy) / (self._size * max(seconds for _, seconds, _ in found))
        ideal = (self._size - 1) / (self._num_microbatches + self._size - 1)
        return (
            f"bubble {bubble:.3f}, (P - 1) / (M + P - 1) is {ideal:.3f}; "
            f"{_against_others(busy, [place for _, _, place in found])}"
        )


def _agreed_costs(layers: Sequence[nn.Module], sample: Tensor | None) -> list[float]:
    """Return what each layer costs, the mean of what all ranks have measured. Collective."""
    if sample is None:
        return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]
    found = gathered(seconds_of(layers, sample))
    return [statistics.mean(times) for times in zip(*found, strict=True)]


def _against_others(busy: Sequence[float], places: Sequence[tuple[int, str]]) -> str:
    """Name the slowest rank of a pipeline, and its time against the others'. Pure."""
    slowest = busy.index(max(busy))
    others = [seconds for rank, seconds in enumerate(busy) if rank != slowest] or [max(busy)]
    ratio, (rank, host) = max(busy) / max(statistics.median(others), 1e-9), places[slowest]
    return (
        f"rank {slowest} of the pipeline is slowest, {ratio:.2f} times the median of the others "
        f"(rank {rank}, on {host})"
    )
