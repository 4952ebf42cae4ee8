"""Layout of ranks that divide a model, padding of batches, and averaging of gradients."""

from collections import Counter
from collections.abc import Callable
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.comm.tensor_bucket import PackedTensors
from hpctrain.core.errors import DataError
from hpctrain.core.user_error import described
from hpctrain.data.loader import Loader
from hpctrain.parallel.dtensor import local, whole
from hpctrain.parallel.mesh import build_mesh, gradient_mesh
from hpctrain.parallel.parallel_config import ParallelConfig
from hpctrain.train.stateful import Precision


class ParallelLayout:
    """Device mesh of all ranks according to ``[parallel]``. The constructor is collective.

    Ranks of one ``tp``, ``pp`` or ``cp`` group process the same samples; ranks along ``dp``
    process different samples.

    Args:
        config: sizes of the mesh axes.
        device_type: device type of the mesh, such as ``cuda``.

    Raises:
        TopologyError: the product of the axes is not the number of ranks; on all ranks.
    """

    def __init__(self, config: ParallelConfig, device_type: str) -> None:
        self.config = config
        inner = {axis: getattr(config, axis) for axis in ("tp", "pp", "cp")}
        self.mesh = build_mesh(**inner, dp=config.dp or None, device=device_type)
        self.averaging = gradient_mesh(self.mesh)
        """Mesh of the ranks whose gradients are averaged."""

    def place(self, axis: str) -> tuple[int, int]:
        """Return this rank's index along an axis, and the size of the axis."""
        return self.mesh[axis].get_local_rank(), self.mesh[axis].size()

    @property
    def num_replicas(self) -> int:
        """Number of replicas, which process different samples."""
        return self.place("dp")[1]

    @property
    def leads(self) -> bool:
        """Whether this rank is the leading rank of its replica, which reports for the replica."""
        stage, stages = self.place("pp")
        return stage == stages - 1 and not self.place("tp")[0] and not self.place("cp")[0]

    @property
    def seed_offset(self) -> int:
        """Offset of the random seed; identical on ranks that compute the same values."""
        return int(self.averaging.get_local_rank())

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a replica in the pipeline; 1 without a pipeline."""
        config = self.config
        return 1 if config.pp == 1 else config.micro_batches or 2 * config.pp

    def share_out(self, *loaders: Loader) -> None:
        """Configure the loaders to read the samples of this rank's replica. Local."""
        for loader in loaders:
            loader.rank, loader.size = self.place("dp")

    def share_buffers(self, model: nn.Module) -> None:
        """Broadcast the buffers of the first replica to all replicas. Collective."""
        group = self.averaging.get_group()
        source = dist.get_process_group_ranks(group)[0]
        for buffer in model.buffers():
            dist.broadcast(local(buffer), source, group=group)

    def describe(self) -> str:
        """Return the axes in one line, such as ``dp=2 x tp=2``."""
        return self.config.describe(self.num_replicas)


class BatchPadding:
    """Divides the sequences of a replica's samples, and pads batches with copies of a sample.

    With a pipeline or sharded parameters, every rank must compute in every step, even without
    samples. The loss of a copy has weight 0.

    Args:
        layout: layout of all ranks.
        global_batch: number of samples in a full batch, over all replicas.
    """

    def __init__(self, layout: ParallelLayout, global_batch: int) -> None:
        self._layout = layout
        self.size = -(-global_batch // layout.num_replicas)
        """Maximum number of samples of a replica in a batch."""
        self._spare: list[Tensor] = []

    def own(self, *tensors: Tensor) -> list[Tensor]:
        """Return this rank's part of each sequence; store one sample for padding. Local.

        Raises:
            DataError: the length of the sequence is not divisible by ``parallel.cp``.
        """
        part, parts = self._layout.place("cp")
        for values in tensors:
            if parts > 1 and (values.dim() < 2 or values.shape[1] % parts):
                raise DataError(
                    f"parallel.cp = {parts} must divide dimension 1 of input and label, the "
                    f"sequence, got {described(values)}; pad the samples in data.transform, or "
                    f"leave cp out"
                )
        mine = [values.chunk(parts, dim=1)[part] if parts > 1 else values for values in tensors]
        if len(mine[0]):
            self._spare = [values[-1:].clone() for values in mine]
        elif not self._spare:  # this replica has not had a sample yet
            self._spare = [values.new_zeros((1, *values.shape[1:])) for values in mine]
        return mine

    def filled(self, *tensors: Tensor, size: int = 1) -> list[Tensor]:
        """Pad ``tensors``, which ``own`` returned, to at least ``size`` samples. Local."""
        return [
            torch.cat([values, spare.expand(size - len(values), *spare.shape[1:])])
            if len(values) < size
            else values
            for values, spare in zip(tensors, self._spare, strict=False)
        ]


class MicroBatches:
    """Runs a replica's batch through a pipeline, and computes the loss of each micro-batch.

    Args:
        padding: padding of the batches.
        loss: function of outputs and labels that returns the mean loss over the samples.
        precision: precision in which the loss is computed.
        number: number of micro-batches per batch.
    """

    def __init__(
        self,
        padding: BatchPadding,
        loss: Callable[[Tensor, Tensor], Tensor],
        precision: Precision,
        number: int,
    ) -> None:
        self._padding, self._loss, self._precision = padding, loss, precision
        self._number = number
        # Labels, number of samples without padding, weight per sample.
        self._batch = torch.empty(0), 0, 0.0
        # Output of each micro-batch, by index of its first sample; None in training.
        self._outputs: dict[int, Tensor] | None = None

    def train(
        self, step: Callable[..., Tensor], inputs: Tensor, labels: Tensor, weight: float
    ) -> Tensor:
        """Run forward and backward; return the loss times ``weight``. Collective over stages."""
        # The pipeline divides the sum of the losses by the number of micro-batches.
        return self._run(step, inputs, labels, weight * self._number / max(len(inputs), 1))

    def outputs(
        self, evaluate: Callable[..., Tensor], inputs: Tensor, labels: Tensor
    ) -> Tensor | None:
        """Run forward; return the output on the last stage, None elsewhere. Collective."""
        self._outputs = {}
        self._run(evaluate, inputs, labels, 0.0)
        parts = [self._outputs[place] for place in sorted(self._outputs)]
        self._outputs = None
        return torch.cat(parts) if parts else None

    def _run(
        self, call: Callable[..., Tensor], inputs: Tensor, labels: Tensor, weight: float
    ) -> Tensor:
        size = -(-self._padding.size // self._number) * self._number
        given, target = self._padding.filled(inputs, labels, size=size)
        self._batch = target, len(inputs), weight
        return call(given, torch.arange(size, device=labels.device))

    def loss(self, output: Tensor, places: Tensor) -> Tensor:
        """Return the weighted loss of a micro-batch, without its padding.

        Args:
            output: output of the model for the micro-batch.
            places: indices of the samples of the micro-batch in the batch of the replica.
        """
        labels, num_own, weight = self._batch
        size = int((places < num_own).sum())
        if self._outputs is not None:
            self._outputs[int(places[0])] = whole(output)[:size]
            return torch.zeros(())
        learnt = slice(max(size, 1))
        with self._precision.autocast():
            return self._loss(output[learnt], labels[places[learnt]]) * (weight * size)


class GradientAverage:
    """Averages the gradients of all replicas in buckets.

    Args:
        layout: layout of all ranks.
        model: this rank's part of the model.
        bucket_bytes: size in bytes from which a bucket is sent.
    """

    def __init__(self, layout: ParallelLayout, model: nn.Module, bucket_bytes: int) -> None:
        self._model, self._bucket_bytes = model, bucket_bytes
        self._group = layout.averaging.get_group()

    @torch.no_grad()
    def run(self) -> None:
        """Replace the gradients by their average over the replicas. Collective over replicas."""
        buckets: dict[torch.dtype, list[Tensor]] = {}
        num_bytes = Counter[torch.dtype]()  # bytes of the open bucket of each dtype
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained]).int()
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        for parameter in compress(trained, used.tolist()):
            if parameter.grad is None:  # another replica has a gradient of this parameter
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            dtype = gradient.dtype
            buckets.setdefault(dtype, []).append(gradient)
            num_bytes[dtype] += gradient.nbytes
            if num_bytes[dtype] >= self._bucket_bytes:
                self._average(buckets.pop(dtype))
                del num_bytes[dtype]
        for bucket in buckets.values():
            self._average(bucket)

    def _average(self, gradients: list[Tensor]) -> None:
        packed = PackedTensors.copied(gradients)
        dist.all_reduce(packed.flat, dist.ReduceOp.AVG, group=self._group)
        packed.unpack(gradients)
