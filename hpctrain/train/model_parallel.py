"""A model that is divided among ranks as ``[parallel]`` says, and its steps."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import compress
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError, DataError, ReplicaError
from hpctrain.core.user_error import described
from hpctrain.data.loader import Loader
from hpctrain.gradients.batch_norm import SyncBatchNorm
from hpctrain.gradients.elementwise import is_known_as
from hpctrain.gradients.sample_count import bits_of, flags_of
from hpctrain.parallel import shard
from hpctrain.parallel.dtensor import clip_grad_norm_, local, whole
from hpctrain.parallel.guard import Guard, guard_of, guarded
from hpctrain.parallel.mesh import build_mesh, gradient_mesh
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.parallel.sharded_optimizer import ShardedOptimizer
from hpctrain.parallel.tensor import tensor_parallel
from hpctrain.train.divided_state import DividedState
from hpctrain.train.model import asked
from hpctrain.train.run_config import RunConfig
from hpctrain.train.stateful import Precision

Loss = Callable[[Tensor, Tensor], Tensor]


class ModelParallel:
    """What this rank has of a model, and how the ranks take a step together.

    Ranks of one ``tp``, ``pp`` or ``cp`` group learn from the same samples, those along ``dp``
    from different ones. A step is that of one process with the whole batch: each replica's mean
    loss counts by its samples, and gradients are averaged. Batches are filled up to one size, as
    the ranks of a pipeline and of sharded parameters must all calculate; what fills has no
    weight.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        precision: Precision,
        comm: Communicator,
    ) -> None:
        """Divide a model, which is the same on all ranks. Collective.

        Args:
            config: of the run.
            model: whole; changed in place.
            optimizer: of the whole model, without state: what it says of each parameter counts.
            loss: mean over the samples of a batch.
            precision: how forward calculates.
            comm: all ranks.

        Raises:
            ConfigError: the model cannot be divided so; on every rank.
            TopologyError: the axes do not multiply to the number of ranks; on every rank.
        """
        self.config, self._train, self._comm = config.parallel, config.train, comm
        self._bucket_bytes = config.comm.bucket_bytes
        _check(model, optimizer)
        self._loss, self._precision = loss, precision
        device = next(model.parameters()).device
        sizes = {axis: getattr(self.config, axis) for axis in ("tp", "pp", "cp")}
        self.mesh = build_mesh(**sizes, dp=self.config.dp or None, device=device.type)
        self._averaging = gradient_mesh(self.mesh)
        self.replica, self.num_replicas = self._place("dp")
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.state = DividedState(model, optimizer, self.mesh["pp"])
        self._pipeline: Pipeline | None = None
        self._batch = torch.empty(0), 0, 0.0  # labels, samples that do not fill, weight of each
        self._outputs: dict[int, Tensor] | None = None  # of micro-batches, where those are asked
        self._spare: list[Tensor] = []  # a sample, by which batches are filled up
        self._flags = self.raised_flags = 0
        self._loss_told, self.mean_loss = 0.0, math.nan
        self.communication_seconds = 0.0
        self.optimizer: Any = optimizer
        self.model = self._divided(model)
        self._guard = self._guarded()
        self.state.keep(self.model, self.optimizer)

    def _divided(self, model: nn.Module) -> nn.Module:
        """Divide matrices first, then sequences, layers, and what replicas have. Collective."""
        config, mesh = self.config, self.mesh
        if config.tp > 1:
            roles = asked(model, "roles", config.roles)
            tensor_parallel(model, mesh["tp"], roles, sequence=config.sequence)
        if config.cp > 1:
            divide = getattr(model, "parallel_context", None)
            if divide is None:
                raise ConfigError(
                    f"parallel.cp = {config.cp} needs a model with a method parallel_context, "
                    f"which takes the mesh that its attention divides the sequence by, and "
                    f"{type(model).__name__} has none; give it one (hpctrain guide parallel), or "
                    f"leave cp out"
                )
            divide(mesh["cp"])
        if config.pp == 1:
            return self._sharded(model)
        self._pipeline = Pipeline(
            model,
            mesh["pp"],
            asked(model, "layers", config.layers),
            loss=self._loss_of_micro_batch,
            num_microbatches=self.micro_batches,
            schedule=config.schedule,
            wrap=self._stage,
        )
        if not config.zero:  # else each stage has been
            return self._sharded(self._pipeline.model)
        return self._pipeline.model

    def _sharded(self, model: nn.Module) -> nn.Module:
        """Make the optimizer of this rank's part, and divide both among replicas. Collective."""
        self.optimizer = self.state.part_of(self.optimizer, model)
        if self.config.zero:
            stage, offload = self.config.zero, self.config.offload or None
            shard(model, self.optimizer, stage=stage, mesh=self._averaging, offload=offload)
        return model

    def _stage(self, stage: nn.Module) -> nn.Module:
        """Let a stage calculate as ``train.precision`` says, forward alone."""
        if self.config.zero:
            self._sharded(stage)
        forward = stage.forward

        def calculate(given: Tensor) -> Tensor:
            with self._precision.autocast():
                found: Tensor = forward(given)
            return found

        stage.forward = calculate
        return stage

    def _guarded(self) -> Guard:
        """Return what compares the steps of all ranks that have parts of the same, or replicas."""
        has_one = max(self.config.tp, self.config.pp) > 1 or self.config.zero > 0
        guard = guard_of(self.model) if has_one else guarded(self.model)
        if not self.config.zero:
            group, device = self._averaging.get_group(), self._averaging.device_type
            guard.replicas.append((group, device, True))
            guard.refresh()
        return guard

    @property
    def micro_batches(self) -> int:
        """Parts in which a replica's samples go through the pipeline, at once otherwise."""
        return 1 if self.config.pp == 1 else self.config.micro_batches or 2 * self.config.pp

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the samples of its replica; the last stage has outputs."""
        stage, stages = self._place("pp")
        return stage == stages - 1 and not self._place("tp")[0] and not self._place("cp")[0]

    @property
    def seed(self) -> int:
        """The same on ranks that calculate the same, as those of a tp group do."""
        number: int = self._averaging.get_local_rank()
        return number

    def share_out(self, *loaders: Loader) -> None:
        """Let loaders, which agree with all ranks, read what this replica learns from."""
        for loader in loaders:
            loader.rank, loader.size = self.replica, self.num_replicas

    def describe(self) -> str:
        """Say which rank has what, in one line, such as ``dp=2 x tp=2``."""
        return self.config.describe(self.num_replicas)

    def raise_flags(self, flags: int) -> None:
        """Say what all ranks shall know after ``backward``, as bits."""
        self._flags |= flags

    def tell_loss(self, loss: float) -> None:
        """Say what all ranks shall know the mean of, as ``mean_loss``, after ``backward``."""
        self._loss_told = loss

    def backward(
        self,
        both: tuple[Tensor, Tensor],
        loss_of: Loss,
        *,
        num_samples: int,
        see: Callable[[float], None],
    ) -> float:
        """Calculate the gradients of a global batch. Collective.

        Args:
            both: inputs and labels of this replica, which may be none.
            loss_of: mean loss of some of them; not called with a pipeline.
            num_samples: of all replicas.
            see: told the loss before flags travel.

        Returns:
            The mean loss of the replica's samples, on each of its ranks; 0 where it has none.
        """
        self.optimizer.zero_grad()
        own, share = len(both[0]), len(both[0]) * self.num_replicas / num_samples
        inputs, labels = self._parts(*both)
        with loss_parallel():
            if self._pipeline is not None:
                value = self._run(self._pipeline.step, inputs, labels, share)
            else:
                value = self._in_pieces(inputs, labels, loss_of, share)
        if self.config.cp > 1:
            dist.all_reduce(value, dist.ReduceOp.AVG, group=self.mesh["cp"].get_group())
        found = value.item() / share if own else 0.0
        see(found)
        began = perf_counter()
        self._average()
        told = self._loss_told * own / num_samples if own and self.leads else 0.0
        words = torch.tensor([told, *bits_of(self._flags)], dtype=torch.float64)
        self._comm.allreduce_(words).wait()
        self.mean_loss, *bits = words.tolist()
        self.raised_flags, self._flags = flags_of(bits), 0
        self.communication_seconds = perf_counter() - began
        return found

    def _in_pieces(self, inputs: Tensor, labels: Tensor, loss_of: Loss, share: float) -> Tensor:
        """Take as many pieces on every rank, also where this one has fewer samples."""
        value, own = torch.zeros((), dtype=torch.float64), len(inputs)
        pieces = min(self._train.accumulate, self._size)
        cut = (values.tensor_split(pieces) for values in (inputs, labels))
        for number, part in enumerate(zip(*cut, strict=True), 1):
            weight = share * len(part[0]) / own if own else 0.0
            more = number < pieces and isinstance(self.optimizer, ShardedOptimizer)
            with self.optimizer.no_sync() if more else nullcontext():
                loss = loss_of(*map(filled, part, (1, 1), self._spare))
                loss.backward(torch.full_like(loss, weight))
            value += whole(loss.detach()).to(value) * weight
        return value

    def _run(self, call: Loss, inputs: Tensor, labels: Tensor, share: float) -> Tensor:
        """Let a batch go through the pipeline, filled up to a size that its stages know."""
        parts = self.micro_batches
        size = -(-self._size // parts) * parts
        # Behind the loss the pipeline divides by the number of parts.
        weight = share * parts / max(len(inputs), 1)
        given, target = map(filled, (inputs, labels), (size, size), self._spare)
        self._batch = target, len(inputs), weight
        places = torch.arange(size, device=labels.device)
        return call(given, places)

    def _loss_of_micro_batch(self, output: Tensor, places: Tensor) -> Tensor:
        """Weigh the mean loss of the samples at some places, without those that only fill."""
        labels, own, weight = self._batch
        size = int((places < own).sum())
        if self._outputs is not None:
            self._outputs[int(places[0])] = whole(output)[:size]
            return torch.zeros(())
        learnt = slice(max(size, 1))
        with self._precision.autocast():
            return self._loss(output[learnt], labels[places[learnt]]) * (weight * size)

    @property
    def _size(self) -> int:
        """Samples of a replica in a full batch, at most."""
        return -(-self._train.global_batch // self.num_replicas)

    def _parts(self, *tensors: Tensor) -> list[Tensor]:
        """Return this rank's part of each sequence, and keep one to fill up with."""
        part, parts = self._place("cp")
        for values in tensors:
            if parts > 1 and (values.dim() < 2 or values.shape[1] % parts):
                raise DataError(
                    f"parallel.cp = {parts} divides dimension 1 of input and label, the sequence, "
                    f"got {described(values)}; pad the samples in data.transform, or leave cp out"
                )
        mine = [values.chunk(parts, dim=1)[part] if parts > 1 else values for values in tensors]
        if len(mine[0]):
            self._spare = [values[-1:].clone() for values in mine]
        elif not self._spare:  # this replica has had no sample at all
            self._spare = [values.new_zeros((1, *values.shape[1:])) for values in mine]
        return mine

    def output(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return the output for a replica's samples, without gradients. Collective.

        None on all of its ranks but one, that which ``leads``; also where it has no samples.
        """
        inputs, labels = self._parts(inputs, labels)
        if self._pipeline is None:
            with self._precision.autocast():
                output = whole(self.model(filled(inputs, 1, self._spare[0])))
            found: Tensor | None = output[: len(inputs)]
        else:
            self._outputs = {}
            self._run(self._pipeline.evaluate, inputs, labels, 0.0)
            parts = [self._outputs[place] for place in sorted(self._outputs)]
            found, self._outputs = torch.cat(parts) if parts else None, None
        if found is not None and self.config.cp > 1:
            parts = [torch.empty_like(found) for _ in range(self.config.cp)]
            dist.all_gather(parts, found.contiguous(), group=self.mesh["cp"].get_group())
            found = torch.cat(parts, dim=1)
        return found if self.leads and len(inputs) else None

    def clip(self, max_norm: float) -> float:
        """Scale the gradients of the whole model to a norm; return that before. Collective."""
        if self._pipeline is not None:
            return float(self._pipeline.clip_grad_norm_(max_norm))
        return float(clip_grad_norm_(self.model.parameters(), max_norm))

    def clip_values(self, most: float) -> None:
        """Clip each element of the gradients; not collective."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-most, most)

    @torch.no_grad()
    def _average(self) -> None:
        """Let all replicas have the mean of their gradients. Collective."""
        if self.config.zero or self._averaging.size() == 1:
            return
        buckets: dict[torch.dtype, list[Tensor]] = {}
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained]).int()
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._averaging.get_group())
        for parameter in compress(trained, used.tolist()):
            if parameter.grad is None:  # as another replica has one
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            bucket = buckets.setdefault(gradient.dtype, [])
            bucket.append(gradient)
            if sum(each.nbytes for each in bucket) >= self._bucket_bytes:
                self._average_bucket(buckets.pop(gradient.dtype))
        for bucket in buckets.values():
            self._average_bucket(bucket)
        self._guard.mark()

    def _average_bucket(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._averaging.get_group())
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def share_buffers(self) -> None:
        """Let all replicas have the buffers of the first one. Collective."""
        group = self._averaging.get_group()
        source = dist.get_process_group_ranks(group)[0]
        for buffer in self.model.buffers():
            dist.broadcast(local(buffer), source, group=group)

    def hash(self) -> str:
        """Return a hash of what all ranks have, which another layout has otherwise. Collective."""
        mine = {name: local(value) for name, value in self.model.state_dict().items()}
        return state_hash({"ranks": self._comm.allgather_object(state_hash(mine))})

    def check_replicas(self) -> None:
        """Return if ranks that should have the same parameters do. Collective.

        Raises:
            ReplicaError: they do not; on every rank.
        """
        if self.config.zero:
            return  # each has its own part
        place = [self.mesh[axis].get_local_rank() for axis in ("pp", "tp")]
        named = self.model.named_parameters()
        mine = str(place), state_hash({name: local(value.detach()) for name, value in named})
        found = dict[str, set[str]]()
        for where, value in self._comm.allgather_object(mine):
            found.setdefault(where, set()).add(value)
        if differ := [where for where, values in found.items() if len(values) > 1]:
            raise ReplicaError(
                f"replicas must be equal, those at [pp, tp] = {', '.join(differ)} have parted; "
                f"look for what some ranks do alone, such as a change outside optimizer.step()"
            )

    def _place(self, axis: str) -> tuple[int, int]:
        """Return this rank's number along an axis, and how many there are."""
        return self.mesh[axis].get_local_rank(), self.mesh[axis].size()


def filled(values: Tensor, size: int, spare: Tensor) -> Tensor:
    """Return at least so many samples: behind those that there are, copies of the spare one."""
    lacks = size - len(values)
    if lacks <= 0:
        return values
    return torch.cat([values, spare.expand(lacks, *spare.shape[1:])])


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` if a part of the model cannot be trained by itself."""
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise ConfigError(
            "hpctrain.SyncBatchNorm takes statistics over all ranks, of which some have parts of "
            "the model with [parallel]; take another norm, or leave [parallel] out"
        )
    if not is_known_as("elementwise", optimizer):
        raise ConfigError(
            f"an optimizer of a divided model steps each element by itself, and whether "
            f"{type(optimizer).__name__} does is not known; take AdamW or SGD, or leave "
            f"[parallel] out"
        )
