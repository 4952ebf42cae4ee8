"""Objects that a rank needs to train, built from a configuration."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.cluster.topology import Topology
from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.target import check_arguments, member, resolve
from hpctrain.core.user_error import described, noted
from hpctrain.data.data_config import DataConfig
from hpctrain.data.format.dataset_manifest import Field
from hpctrain.data.loader import Loader
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import Batch, Ragged
from hpctrain.data.staging import stage
from hpctrain.data.subset import Subset
from hpctrain.data.transform import PerSample, Transform
from hpctrain.runtime import world
from hpctrain.train.make_exchange import make_exchange
from hpctrain.train.model import (
    BuiltModel,
    choose_device,
    load_first_weights,
    make_model,
    make_optimizer,
    make_schedule,
    prepare,
    with_shard,
)
from hpctrain.train.refusals import explain_errors, targets
from hpctrain.train.run_config import LossConfig, RunConfig
from hpctrain.train.scores import LOSS, Metric, make_metric
from hpctrain.train.stateful import Ema, Precision
from hpctrain.train.step_exchange import StepExchange
from hpctrain.train.tables import Tables

CPU = torch.device("cpu")

_ONE_LENGTH = (
    "samples must have one length with train.reproducible, because padding depends on the number "
    "of ranks; pad them to a fixed length in data.transform"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Model, loss, metrics, data loaders and exchange of a run on this rank."""

    config: RunConfig
    comm: Communicator
    loss: Callable[[Tensor, Tensor], Tensor]  # mean over the samples of a batch
    metrics: Sequence[Metric]  # the first metric selects the best checkpoint
    precision: Precision
    ema: Ema | None
    exchange: StepExchange  # combines the gradients or steps of the ranks
    train: Loader
    test: Loader  # for tests during training
    held_out: Loader | None = None
    """Loader of the test set, for the test after training; None if ``test`` has these samples."""
    schedule: Callable[[int], float]  # maps a step index, from 0, to a factor of ``optimizer.lr``
    shard_reason: str = ""  # description of the choice for train.shard = auto; else empty
    device: torch.device = CPU
    device_reason: str = ""  # description of the chosen device; empty if only CPUs can be used

    @property
    def model(self) -> nn.Module:
        """Model of this rank, or this rank's part of a model that the ranks divide."""
        return self.exchange.model

    @property
    def optimizer(self) -> Any:
        """Optimizer of this rank; a ``DistributedOptimizer`` if the ranks average gradients."""
        return self.exchange.optimizer

    @property
    def num_train_samples(self) -> int:
        """Samples per epoch."""
        return len(self.train.dataset)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return len(self.train) * self.config.train.epochs

    @property
    def num_samples(self) -> int:
        """Samples of the whole run; a sample counts once per epoch."""
        return self.num_train_samples * self.config.train.epochs

    @property
    def metric_name(self) -> str:
        """Name of the first metric."""
        return self.metrics[0].name

    @property
    def tested(self) -> str:
        """Name of the samples that tests during training use: ``test`` or ``validation``."""
        return "test" if self.held_out is None else "validation"

    @property
    def is_larger_better(self) -> bool:
        """Whether a larger value of the first metric is better."""
        mode = self.config.test.mode
        return mode == "max" or (mode == "auto" and self.metric_name != LOSS)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, if any. Collective."""
        return self.exchange.averaged() if self.ema is None else self.ema.applied()

    def split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the input of the model and the labels, on the device of the model.

        Copies to an accelerator are asynchronous, ordered by its current stream.

        Raises:
            DataError: a transform removed a field or samples; or the samples of a batch differ in
                length with ``train.reproducible``.
        """
        names = self.config.data.input, self.config.data.label
        inputs, labels = (batch.fields.get(name) for name in names)
        if not all(_has_rows(values, batch.num_samples) for values in (inputs, labels)):
            whose = " or ".join(filter(None, dict.fromkeys(_transforms(self.config.data))))
            has = ", ".join(f"{name} {described(each)}" for name, each in batch.fields.items())
            raise DataError(
                f"a transform must keep {' and '.join(names)} of every sample as tensors, but "
                f"{whose or 'a data set'} returned {has} for {batch.num_samples} samples; return "
                f"all fields and samples, and choose samples in data.target"
            )
        if not (isinstance(inputs, Tensor) and isinstance(labels, Tensor)):
            raise DataError(_ONE_LENGTH)
        if self.device == CPU:
            return inputs, labels
        there = [values.to(self.device, non_blocking=True) for values in (inputs, labels)]
        return there[0], there[1]

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        output: Tensor | None = None,
        tries_backward: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the model and the mean loss, computed in ``train.precision``.

        Args:
            inputs: input of the model, one row per sample.
            labels: one row per sample.
            output: output of the model, if already computed.
            tries_backward: also compute the gradient of the loss with respect to the output,
                because some losses reject a dtype only in backward.

        Raises:
            DataError: model, loss and data do not fit together, or the loss is not a scalar.
        """
        model, whose = targets(self.config)
        with self.precision.autocast():
            with explain_errors(model, inputs):
                output = self.model(inputs) if output is None else output
            with explain_errors(whose, output, labels):
                loss: object = self.loss(output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DataError(
                f"{whose} must return one number for a batch, such as the mean over the samples, "
                f"but returned {described(loss)} for the output {described(output)} and the "
                f"labels {described(labels)}"
            )
        if tries_backward and not loss.requires_grad:
            raise DataError(
                f"the loss must depend on weights that require gradients, but the loss of {model} "
                f"and {whose} does not; check for detach(), no_grad() or operations outside torch"
            )
        if tries_backward and getattr(output, "requires_grad", False):
            with explain_errors(whose, output, labels):
                torch.autograd.grad(loss.sum(), output, retain_graph=True, allow_unused=True)
        return output, loss


@dataclass(frozen=True, slots=True)
class _Named:
    """Wraps a user's function, so that errors of the function name its configuration key."""

    whose: str
    function: Callable[..., Any]

    def __call__(self, given: Any, *others: Any) -> Any:
        with noted(self.whose, given):
            return self.function(given, *others)

    def __str__(self) -> str:
        return self.whose


def _has_rows(values: object, num: int) -> bool:
    is_many = isinstance(values, Ragged) or (isinstance(values, Tensor) and values.dim() > 0)
    return is_many and len(values) == num  # type: ignore[arg-type]


def build(config: RunConfig, comm: Communicator, *, is_new: bool = True) -> Task:
    """Build model, data loaders, optimizer and exchange. Collective.

    All ranks start with the parameters of rank 0.

    Args:
        config: configuration of the run.
        comm: all ranks.
        is_new: whether to load ``model.init_from``; False if a run continues from a checkpoint.

    Raises:
        MismatchError: a name in the configuration is wrong or cannot be imported; on all ranks.
    """
    with agreed(comm):
        seed_all(config.seed)
        device, why = choose_device(config.train, world.current().topology.devices)
        model = make_model(config.model).to(device)
        loss, metrics = _loss(config.loss), [*map(make_metric, config.test.metrics)]
        optimizer = make_optimizer(model, config.optimizer)
        prepare(model, config)
        make_data = resolve(config.data.target, "data.target")
        check_arguments(make_data, 1, config.data.args, "data.args")
    with agreed(comm):
        with noted(f'data.target = "{config.data.target}"'):
            data = make_data(comm, **config.data.args)
        train, *tests = _loaders(config, data, comm, device)
        schedule = make_schedule(config, len(train))
    if config.data.stage:
        stage_for(train, config.data.stage, comm, world.current().topology)
    tables = _broadcast_weights(config, model, comm, is_new=is_new)
    nodes = world.current().topology.nodes if comm.node is not None else ()
    config, reason = with_shard(config, model, optimizer, [*map(len, nodes)])
    precision = Precision(config.train.precision, model)
    built = BuiltModel(
        model=model,
        optimizer=optimizer,
        loss=loss,
        precision=precision,
        tables=tables,
        epoch_steps=len(train),
    )
    exchange = make_exchange(config, comm, built)
    exchange.share_out(train, *tests)
    # Dropout must differ between ranks, except within a tensor-parallel group.
    seed_all(config.seed + exchange.seed_offset)
    return Task(
        config=config,
        comm=comm,
        loss=loss,
        metrics=metrics,
        precision=precision,
        ema=Ema(exchange.model, config.train.ema) if config.train.ema else None,
        exchange=exchange,
        train=train,
        **dict(zip(("test", "held_out"), tests, strict=False)),
        schedule=schedule,
        shard_reason=reason,
        device=device,
        device_reason=why,
    )


def _broadcast_weights(
    config: RunConfig, model: nn.Module, comm: Communicator, *, is_new: bool
) -> Tables:
    """Load initial weights if ``is_new``, and broadcast the parameters of rank 0. Collective.

    The initial weights are read from the path ``model.init_from``, if set. Local methods broadcast
    the parameters later. Returns the sharded embeddings of the model, with initial rows.
    """
    with agreed(comm):
        tables = Tables(model, config)
    if is_new and config.model.init_from:
        on_root(comm, lambda: load_first_weights(model, config.model))
    if not config.sync.is_local:  # local methods broadcast the parameters themselves
        broadcast_parameters(model.state_dict())
    if is_new and config.model.init_from:
        tables.load(Path(config.model.init_from), comm)
    return tables


def _loss(config: LossConfig) -> Callable[[Tensor, Tensor], Tensor]:
    if ":" in config.target:
        function = resolve(config.target, "loss.target")
    else:
        function = member(functional, config.target, "loss.target")
    args: Mapping[str, Any] = dict(config.args)
    check_arguments(function, 2, args, "loss.args")
    return lambda output, label: function(output, label, **args)


def _loaders(
    config: RunConfig, data: object, comm: Communicator, device: torch.device
) -> Iterator[Loader]:
    """Yield a loader for training, one for tests during training, and one for the last test.

    If all tests use the same samples, yield only the first two loaders.
    """
    if not (isinstance(data, tuple) and len(data) in (2, 3) and all(map(_has_samples, data))):
        raise ConfigError(
            f"data.target must return two data sets (train, test) or three (train, validation, "
            f"test), such as those of ShardedDataset.open, but {config.data.target} returned "
            f"{described(data)}; pack your data with write_arrays or hpctrain data pack (see "
            f"hpctrain guide train), or write your own script with hpctrain.shard_data(dataset)"
        )
    train, *tests = data
    if config.data.validation:
        if len(tests) > 1:
            raise ConfigError(
                f"data.validation must be 0 if data.target returns a validation set, got "
                f"{config.data.validation:g}; omit the key, or return (train, test)"
            )
        train, validation = _divided(train, config.data.validation, config.seed)
        tests.insert(0, validation)
    _check_batch(config, len(train), comm)
    transforms = [_transform(config.data, name) for name in _transforms(config.data)]
    for dataset, transform in zip(data, [*transforms, transforms[1]], strict=False):
        if transform is None:
            _check_fields(config, dataset.fields)
    micro_shards = config.train.micro_shards_on(comm.size)
    shared: dict[str, Any] = {
        "global_batch": config.train.global_batch,
        "comm": comm,
        "seed": config.seed,
        "prefetch": config.data.prefetch,
        "on_corrupt": config.data.on_corrupt,
        "ragged": "packed" if micro_shards else "padded",
        "micro_shards": micro_shards,
        "pin_memory": device != CPU,
    }
    yield Loader(
        train,
        order=config.data.order,
        transform=transforms[0],
        split=config.data.split or None,
        workers=config.data.workers,
        worker_timeout_s=config.data.worker_timeout_s,
        **shared | _alone(config, comm),
    )
    for test in tests:
        yield Loader(test, order="sequential", transform=transforms[1], **shared)


def _divided(dataset: Any, part: float, seed: int) -> tuple[Subset, Subset]:
    """Divide a data set into training and validation samples, identically on all ranks."""
    num_held = round(part * len(dataset))
    if not 0 < num_held < len(dataset):
        raise ConfigError(
            f"data.validation must leave samples for training and for validation, but {part:g} of "
            f"{len(dataset)} samples is {num_held}; use another fraction"
        )
    order = np.random.default_rng(seed).permutation(len(dataset))
    return Subset(dataset, np.sort(order[num_held:])), Subset(dataset, np.sort(order[:num_held]))


def _alone(config: RunConfig, comm: Communicator) -> dict[str, Any]:
    """Return arguments of ``Loader`` that prevent communication; empty without a local method."""
    if not config.sync.is_local:
        return {}
    return {"comm": None, "rank": comm.rank, "size": comm.size}


def _check_batch(config: RunConfig, num_samples: int, comm: Communicator) -> None:
    """Raise ``ConfigError`` if the global batch exceeds the number of training samples.

    With a local method, also raise ``ConfigError`` if the batch has fewer samples than ranks.
    """
    batch = config.train.global_batch
    if batch > num_samples:
        raise ConfigError(
            f"train.global_batch must not exceed the training samples, got {batch} for "
            f"{num_samples} samples; use --set train.global_batch={num_samples} or less, or more "
            f"data"
        )
    if config.sync.is_local and batch < comm.size:
        raise ConfigError(
            f"train.global_batch must give each of {comm.size} ranks a sample for sync.method = "
            f"{config.sync.method}, got {batch}; use a larger batch or fewer ranks"
        )


def _check_fields(config: RunConfig, fields: Mapping[str, Field]) -> None:
    """Raise an error if the input or label field is missing or has an unsupported length.

    With ``train.reproducible``, all samples of a field must have one length.
    """
    for key in ("input", "label"):
        name = getattr(config.data, key)
        if name not in fields:
            raise ConfigError(
                f'data.{key} must be a field of the data, {", ".join(fields)}, got "{name}"'
            )
        if fields[name].ragged and config.train.reproducible:
            raise DataError(f'data.{key} = "{name}": {_ONE_LENGTH}')


def _has_samples(data: object) -> bool:
    return all(hasattr(data, name) for name in ("take", "fields", "__len__"))


def _transforms(config: DataConfig) -> tuple[str, str]:
    """Return the names of two transforms, for training and for tests; empty for no transform."""
    test = config.test_transform or config.transform
    return config.transform, "" if test == "none" else test


def _transform(config: DataConfig, name: str) -> Transform | None:
    if not name:
        return None
    is_training = name == config.transform
    key = "data.transform" if is_training else "data.test_transform"
    function, takes_random = resolve(name, key), config.random and is_training
    check_arguments(function, 2 if takes_random else 1, {}, key)
    named = _Named(f'{key} = "{name}"', function)
    return PerSample(named, random=takes_random) if config.per_sample else named


def stage_for(loader: Loader, to: str, comm: Communicator, topology: Topology) -> None:
    """Copy the data set to each node, and let ``loader`` read the copy. Collective.

    Args:
        loader: its data set is replaced by the copy.
        to: folder for the copy; ``auto`` chooses a folder with enough free space.
        comm: all ranks.
        topology: topology of the ranks of ``comm``.

    Raises:
        ConfigError: the loader does not read a ``ShardedDataset``.
        MismatchError: the folder cannot be used, or the data is damaged; on all ranks.
    """
    dataset = loader.dataset
    if not isinstance(dataset, ShardedDataset):
        raise ConfigError(
            f"data.target must return a ShardedDataset for data.stage, which copies its files, "
            f"got {type(dataset).__name__}; copy the files in data.target, or leave data.stage "
            f"out"
        )
    groups = [comm.group(ranks) for ranks in topology.nodes]
    node = groups[topology.node]
    assert node is not None
    with agreed(comm):
        loader.dataset = stage(dataset, node, to)
    node.close()


def seed_all(seed: int) -> None:
    """Seed the random generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - a user's model may draw from it
    random.seed(seed)
