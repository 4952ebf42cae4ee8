"""Pipeline parallelism with torch's schedules, balanced stages and tied weights."""

import socket
import statistics
import time
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import can_pipeline, require
from hpctrain.parallel.dtensor import local, norm_of, whole
from hpctrain.parallel.guard import EVALUATION, FORWARD, attach, guarded, release
from hpctrain.parallel.mesh import require_one_axis
from hpctrain.parallel.mesh_agreement import digest, gathered, require_identical, signature_of
from hpctrain.parallel.split import Chain, cut, layers_of, seconds_of
from hpctrain.parallel.stage import PipelineSchedule
from hpctrain.parallel.tied_weights import TiedWeights

SAME = "create the same pipeline on every rank"
SAME_WEIGHTS = (
    "set the same seed or load the same file on every rank, or call "
    "hvd.broadcast_parameters(model.state_dict()) before"
)
Loss = Callable[[Tensor, Tensor], Tensor]
Wrap = Callable[[nn.Module], nn.Module]


class Pipeline:
    """Pipeline parallel model: divides the layers of a model into stages on several ranks.

    The constructor is collective over all ranks. The attribute ``model`` contains the layers of
    this rank under their names in the whole model, for the optimizer and for distributed
    checkpoints: ``AdamW(pipeline.model.parameters())``. The pipeline keeps no reference to the
    whole model; delete the whole model to free its memory.

    Args:
        model: whole model, identical on all ranks, with equal weights.
        mesh: one axis, such as ``build_mesh(pp=2)["pp"]``.
        layers: names of the modules that forward calls one after another, in this order; ``*``
            matches a part of a dotted name: ``["embedding", "blocks.*", "head"]``.
        loss: function of the output of the last layer and the target of a micro-batch that
            returns the mean loss.
        num_microbatches: number of equal parts of a batch; for ``1f1b`` at least the number of
            ranks.
        schedule: ``gpipe`` or ``1f1b`` with one stage per rank; ``interleaved``, ``zero_bubble``
            or ``zbv`` with two stages per rank.
        stages_per_rank: number of stages of each rank, for ``interleaved`` and ``zero_bubble``.
            With these schedules on P ranks, the number of micro-batches M must be divisible by
            ``M // P``; each multiple of P is.
        sample: micro-batch with which the layers are timed to balance the stages; None to balance
            stages by the number of parameters.
        wrap: function that is applied to each stage, such as ``fully_shard`` over ``mesh["dp"]``.

    Raises:
        ConfigError: a schedule or layer does not exist, the schedule requires another number of
            stages or micro-batches, there are more stages than layers, a parameter is in no layer,
            or selective recomputation is used with a schedule that divides backward in two.
        MismatchError: the ranks pass different arguments, or models with different weights; on
            every rank of the axis.

    Source: Huang et al. 2019, arXiv:1811.06965 (GPipe); Narayanan et al. 2021, arXiv:2104.04473
    (1F1B, interleaved); Qi et al. 2024, arXiv:2401.10241 (zero bubble).
    """

    def __init__(  # noqa: PLR0913 - keyword-only options
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
        require_one_axis(mesh, "pp")
        require("a pipeline", can_pipeline, "2.7")
        self._mesh, self._group = mesh, mesh.get_group()
        options = f"{schedule=}, {num_microbatches=}, {stages_per_rank=}, layers={[*layers]}"
        first = f"sample {None if sample is None else (tuple(sample.shape), sample.dtype)}"
        require_identical(mesh, [options, first, *signature_of(model)], "a pipeline", SAME)
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = [f"{name} {digest(local(v))}" for name, v in values.items() if not v.is_meta]
        require_identical(mesh, found, "the weights of a pipeline", SAME_WEIGHTS)
        self._loss = loss
        self._schedule = PipelineSchedule(
            schedule, mesh.size(), stages_per_rank, num_microbatches, model
        )
        chain, rank_of = layers_of(model, layers), self._schedule.rank_of
        costs = _agreed_costs([layer for _, layer in chain], sample)
        self.split = cut(costs, len(rank_of))
        """Indices of the layers of each stage."""
        self._device = next(model.parameters()).device
        release(model)
        self._place(chain, wrap)
        self._seconds = 0.0
        self._learnt: object = None

    def _place(self, chain: Sequence[tuple[str, nn.Module]], wrap: Wrap | None) -> None:
        """Create ``model`` and the stages of this rank. Collective over all ranks."""
        rank_of, mesh = self._schedule.rank_of, self._mesh
        mine = [stage for stage, rank in enumerate(rank_of) if rank == mesh.get_local_rank()]
        parts = {stage: [chain[number] for number in self.split[stage]] for stage in mine}
        self.model = Chain([layer for stage in sorted(parts) for layer in parts[stage]])
        ranks = zip(rank_of, self.split, strict=True)
        rank_of_layer = {layer: rank for rank, part in ranks for layer in part}
        self._tied = TiedWeights(chain, rank_of_layer, mesh, self.model)
        self._guard = guarded(self.model, stages=mesh, shared=self._tied.shared)
        chains = {stage: Chain(layers) for stage, layers in parts.items()}
        wrapped = {stage: wrap(part) if wrap else part for stage, part in chains.items()}
        self._stages = self._schedule.make_stages(wrapped, self._device, self._group)
        self._watch([*chains.values()], [*wrapped.values()])

    def _watch(self, chains: Sequence[nn.Module], wrapped: Sequence[nn.Module]) -> None:
        """Attach one guard to all stages of this rank and to their replicas."""
        guard = self._guard
        for chain in chains:
            guard.num_flags = max(guard.num_flags, release(chain))
            attach(chain, guard)
        groups = {one.process_group for one in wrapped if isinstance(one, DistributedDataParallel)}
        guard.add_replicas(groups, self._device.type, is_averaged=False)

    def step(self, given: Tensor, target: Tensor) -> Tensor:
        """Run forward and backward of a batch, and accumulate gradients. Collective over the axis.

        All ranks of the axis pass the same batch. The gradients of a weight that several stages
        share are summed. Batch sizes and ``requires_grad`` may change between steps. If the
        scores of the last layer are tensor parallel, call ``step`` within ``loss_parallel()``.

        Args:
            given: ``(n, ...)``, input of the first layer; ``n`` is a multiple of
                ``num_microbatches``.
            target: ``(n, ...)``, target of the loss.

        Returns:
            The mean loss, on every rank.

        Raises:
            ConfigError: the batch cannot be divided into micro-batches, the number of targets
                differs, or a shared weight is frozen in some stages; on every rank of the axis.
            MismatchError: the ranks pass different batches, or have changed gradients, weights or
                settings differently; on every rank of the axis.
        """
        self._check_batch(given, target, FORWARD)
        self._tied.begin_step()
        loss = self._run("step", given, target)
        self._tied.end_step()
        self._guard.mark()
        return loss

    def evaluate(self, given: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch, without gradients. Collective over the axis.

        Arguments, result and errors are as for ``step``.
        """
        self._check_batch(given, target, EVALUATION)
        with torch.no_grad():
            return self._run("eval", given, target)

    def _run(self, what: str, given: Tensor, target: Tensor) -> Tensor:
        for stage in self._stages:
            stage.reset()
        losses: list[Tensor] = []
        # Torch before 2.13 raises an error unless inputs have the strides of a contiguous tensor.
        inputs = (given.contiguous(),) if self._stages[0].is_first else ()
        targets = target if self._stages[-1].is_last else None
        start = time.perf_counter()
        self._schedule.run(what, *inputs, target=targets, losses=losses)
        self._seconds = time.perf_counter() - start
        mean = torch.zeros((), dtype=torch.float64)
        if losses:
            mean = torch.stack([whole(loss.detach()) for loss in losses]).sum().to(mean)
        source = dist.get_process_group_ranks(self._group)[self._schedule.rank_of[-1]]
        dist.broadcast(mean, source, group=self._group)
        return mean

    def _check_batch(self, given: Tensor, target: Tensor, what: int) -> None:
        """Check a batch; raise on all ranks of the axis or none. Collective over the axis."""
        lines = [f"given {digest(given)}", f"target {digest(target)}"]
        mine = zlib.crc32("".join(lines).encode())
        trained = tuple(parameter.requires_grad for parameter in self.model.parameters())
        now = tuple(given.shape), given.dtype, tuple(target.shape), trained
        is_new, differs = self._guard.compare(what, batch=mine, is_new=now != self._learnt)
        if differs:
            remedy = "divide data among the ranks of dp only"
            require_identical(self._mesh, lines, "a batch of a pipeline", remedy)
        if len(given) != len(target):
            raise ConfigError(
                f"a batch must have a target for each sample, got {len(given)} samples "
                f"and {len(target)} targets; pass one target per sample"
            )
        num = self._schedule.num_microbatches
        if len(given) % num:
            raise ConfigError(
                f"the number of samples of a batch must be a multiple of the {num} "
                f"micro-batches, got {len(given)} samples; use a multiple of {num}"
            )
        if is_new:
            self._guard.do_all_step = self._tied.check_trained()
            self._schedule.prepare(self._stages, self._loss)
            self._learnt = now

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages to a norm of at most ``max_norm``.

        Collective over the axis. A weight that several stages share counts once.

        Returns:
            The norm before scaling, on every rank.

        Raises:
            MismatchError: the ranks pass different values of ``max_norm``; on every rank.
        """
        norm = norm_of(p.grad for p in self._tied.counted() if p.grad is not None)
        sums = torch.zeros(1 + self._mesh.size(), dtype=torch.float64)
        sums[0] = norm.to(sums).square()
        # Each rank fills its own element, so the sum contains max_norm of all ranks.
        sums[1 + self._mesh.get_local_rank()] = max_norm
        dist.all_reduce(sums, group=self._group)
        if not torch.equal(sums[1:], sums[1].expand(self._mesh.size())):
            lines, remedy = [f"max_norm {max_norm}"], "pass the same value"
            require_identical(self._mesh, lines, "an argument of clip_grad_norm_", remedy)
        norm = sums[0].sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    @property
    def most_in_flight(self) -> int:
        """Largest number of micro-batches in flight on this rank in the last step."""
        return sum(stage.most_in_flight for stage in self._stages)

    def report(self) -> str:
        """Return a text about the waiting time of the last step. Collective over the axis.

        Returns:
            One line, on every rank: the bubble, which is the mean fraction of the step in which a
            rank waits; the bubble of equally fast stages, ``(P - 1) / (M + P - 1)`` for M
            micro-batches on P ranks; and the slowest rank.

        Raises:
            ConfigError: ``step`` was not called.
        """
        if not self._seconds:
            raise ConfigError(
                "report() must be called after step(), but no step was taken; call step()"
            )
        mine = sum(stage.busy_s for stage in self._stages)
        here = dist.get_rank(), socket.gethostname()
        found = gathered((mine, self._seconds, here), self._mesh)
        busy = [seconds for seconds, _, _ in found]
        # Ranks end a step at different times; the longest time is the time of the step.
        size = self._mesh.size()
        bubble = 1 - sum(busy) / (size * max(seconds for _, seconds, _ in found))
        ideal = (size - 1) / (self._schedule.num_microbatches + size - 1)
        return (
            f"bubble {bubble:.3f}, (P - 1) / (M + P - 1) is {ideal:.3f}; "
            f"{_against_others(busy, [place for _, _, place in found])}"
        )


def _agreed_costs(layers: Sequence[nn.Module], sample: Tensor | None) -> list[float]:
    """Return the cost of each layer, the same on all ranks. Collective if ``sample`` is given.

    The cost is the mean time over all ranks in seconds, or without ``sample`` the number of
    parameters.
    """
    if sample is None:
        return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]
    found = gathered(seconds_of(layers, sample))
    return [statistics.mean(times) for times in zip(*found, strict=True)]


def _against_others(busy: Sequence[float], places: Sequence[tuple[int, str]]) -> str:
    """Return a text with the slowest rank and its time relative to the other ranks."""
    slowest = busy.index(max(busy))
    others = [seconds for rank, seconds in enumerate(busy) if rank != slowest] or [max(busy)]
    ratio, (rank, host) = max(busy) / max(statistics.median(others), 1e-9), places[slowest]
    return (
        f"rank {slowest} of the pipeline is slowest, {ratio:.2f} times the median of the others "
        f"(rank {rank}, on {host})"
    )
