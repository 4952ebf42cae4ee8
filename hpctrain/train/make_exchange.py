"""Construction of the exchange that a configuration names."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.async_sgd.downpour import AsyncSGD, Downpour
from hpctrain.async_sgd.stale_synchronous import StaleSynchronous
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.compress.by_name import codec_named
from hpctrain.compress.codec import Codec
from hpctrain.core.errors import ConfigError
from hpctrain.core.target import check_arguments
from hpctrain.gradients.optimizer import DistributedOptimizer
from hpctrain.gradients.reproducible import Reproducible
from hpctrain.local_sgd.diloco import DiLoCo
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.local_sgd.local_sgd import HierarchicalLocalSGD, LocalSGD, PostLocalSGD
from hpctrain.local_sgd.staged_sgd import StagedSGD
from hpctrain.train.async_exchange import AsyncExchange
from hpctrain.train.averaged_exchange import AveragedExchange, ShardedExchange
from hpctrain.train.local_exchange import LocalExchange
from hpctrain.train.reproducible_exchange import ReproducibleExchange
from hpctrain.train.run_config import RunConfig
from hpctrain.train.stateful import Precision
from hpctrain.train.step_exchange import StepExchange
from hpctrain.train.sync_config import SyncConfig
from hpctrain.train.tables import Tables

Loss = Callable[[Tensor, Tensor], Tensor]

WITHIN_S = 1.0  # all ranks know of a stop, or of a checkpoint by the clock, after about so long

_KINDS: Mapping[str, type[LocalMethod]] = {
    "local_sgd": LocalSGD,
    "post_local_sgd": PostLocalSGD,
    "hierarchical_local_sgd": HierarchicalLocalSGD,
    "diloco": DiLoCo,
    "staged_sgd": StagedSGD,
}
_ASYNC: Mapping[str, tuple[type[AsyncMethod], str]] = {
    "ssp": (StaleSynchronous, "staleness"),
    "downpour": (Downpour, "most_ahead"),
    "async": (AsyncSGD, "most_ahead"),
}
"""Asynchronous methods, and what ``sync.staleness`` is called there."""


def make_exchange(  # noqa: PLR0913, PLR0917 - all that a step is made of
    config: RunConfig,
    comm: Communicator,
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    precision: Precision,
    tables: Tables,
    epoch_steps: int,
) -> StepExchange:
    """Return the exchange that ``config`` names; it may replace model and optimizer. Collective.

    Args:
        config: of the run, with ``train.shard`` resolved.
        comm: all ranks.
        model: the same on all ranks.
        optimizer: plain, without state.
        loss: mean over the samples of a batch.
        precision: of forward and loss.
        tables: sharded embeddings of the model.
        epoch_steps: number of steps of an epoch.

    Raises:
        MismatchError: a method refuses its arguments; on all ranks.
    """
    _check_noise(config)
    with agreed(comm):
        if (num_micro_shards := config.train.micro_shards_on(comm.size)) is not None:
            shards = {"num_micro_shards": num_micro_shards, "seed": config.seed}
            steps = Reproducible(model, optimizer, comm, **shards)
            return ReproducibleExchange(config, comm, model, optimizer, steps)
        if config.sync.is_async:
            return AsyncExchange(
                config, comm, model, _async_method(config.sync, model, optimizer), precision
            )
        if config.sync.is_local:
            num_steps = epoch_steps * config.train.epochs
            lengths = {"epoch_steps": epoch_steps, "num_steps": num_steps}
            method = _local_method(config.sync, model, optimizer, seed=config.seed, **lengths)
            return LocalExchange(config, comm, model, optimizer, method, precision)
    with agreed(comm):
        if config.parallel.divides:
            # torch's parallel tools take seconds to import.
            from hpctrain.train.model_parallel import ModelParallel  # noqa: PLC0415
            from hpctrain.train.parallel_exchange import ParallelExchange  # noqa: PLC0415

            parts = ModelParallel(config, model, optimizer, loss, precision, comm)
            return ParallelExchange(config, comm, parts)
        if config.parallel.dp not in (0, comm.size):
            raise ConfigError(
                f"parallel.dp must be the number of ranks, {comm.size}, where each has the whole "
                f"model, but it is {config.parallel.dp}; leave it out, or divide the model by tp, "
                f"pp or cp too"
            )
    optimizer = distributed(config, model, optimizer)
    kind = AveragedExchange if config.train.shard == "none" else ShardedExchange
    return kind(config, comm, model, optimizer, precision, tables)


def _local_method(
    config: SyncConfig,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    epoch_steps: int,
    num_steps: int,
    seed: int,
) -> LocalMethod:
    kind = _KINDS[config.method]
    args = {
        "steps": config.steps,
        "compression": codec_of(config),
        **_in_steps(config, epoch_steps, num_steps),
    }
    if config.fraction != 1 or config.proximal:
        args = {"fraction": config.fraction, "proximal": config.proximal, "seed": seed, **args}
    _check(kind, args)
    with _refusing(config.method):
        made = kind(model, optimizer, **args)
    made.rounds.within_s = WITHIN_S
    return made


def _async_method(config: SyncConfig, model: nn.Module, optimizer: Optimizer) -> AsyncMethod:
    kind, name = _ASYNC[config.method]
    args = {name: config.staleness, **config.args}
    check_arguments(kind, 2, args, "sync.args")
    make: Any = kind  # the classes differ in their arguments, which were checked
    with _refusing(config.method):
        made: AsyncMethod = make(model, optimizer, **args)
    return made


@contextmanager
def _refusing(method: str) -> Iterator[None]:
    """Say which method it is that does not take its arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError
        raise ConfigError(f"[sync] {method} refuses: {error}") from error


def distributed(config: RunConfig, model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Let an optimizer average gradients in every step, as ``[train]`` and ``[sync]`` say."""
    train, named = config.train, model.named_parameters()
    shard = None if train.shard == "none" else train.shard
    masters = None if train.master_dtype == "none" else torch.float32
    made: Optimizer = DistributedOptimizer(
        optimizer, named, codec_of(config.sync), shard=shard, master_dtype=masters
    )
    return made


def codec_of(config: SyncConfig) -> Codec:
    """Return what ``sync.compression`` names.

    Raises ``ConfigError``: it does not take its arguments.
    """
    return codec_named(config.compression, config.compression_args, "sync.compression_args")


def _check_noise(config: RunConfig) -> None:
    """Raise ``ConfigError`` if a noise scale is asked of an exchange that cannot measure it."""
    train, sync = config.train, config.sync
    if config.log.noise_scale and (train.reproducible or sync.is_local or config.parallel.divides):
        raise ConfigError(
            "log.noise_scale compares gradients of ranks with their average, which "
            "train.reproducible, a local sync.method and [parallel] lack; leave one of them out"
        )


def _check(kind: type[LocalMethod], args: Mapping[str, Any]) -> None:
    """Raise if a method does not take some argument; some hand others on to ``LocalSGD``."""
    if kind is not LocalSGD and issubclass(kind, LocalSGD):
        own = signature(kind).parameters
        args = {name: value for name, value in args.items() if name not in own}
        kind = LocalSGD
    check_arguments(kind, 2, args, "sync.args")


def _in_steps(config: SyncConfig, epoch_steps: int, num_steps: int) -> dict[str, Any]:
    """Return the arguments of a method, with numbers of epochs as numbers of steps."""
    args = dict(config.args)
    if config.method == "post_local_sgd":
        start = _taken(args, "start_epochs", "start", epoch_steps)
        args |= {} if start is None else {"start": start}
    elif config.method == "staged_sgd":
        warmup = _taken(args, "warmup_epochs", "warmup_steps", epoch_steps)
        cooldown = _taken(args, "cooldown_epochs", "cooldown_start", epoch_steps)
        tenth = num_steps // 10
        args.setdefault("warmup_steps", tenth if warmup is None else warmup)
        args.setdefault("cooldown_start", num_steps - (tenth if cooldown is None else cooldown))
    return args


def _taken(args: dict[str, Any], name: str, other: str, epoch_steps: int) -> int | None:
    """Take a number of epochs out of the arguments, and return it in steps; None without it."""
    epochs = args.pop(name, None)
    if epochs is None:
        return None
    if other in args:
        raise ConfigError(
            f"sync.args has {name} or {other}, got {name}={epochs!r} and "
            f"{other}={args[other]!r}; leave one out"
        )
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not epochs >= 0:
        raise ConfigError(f"sync.args.{name} is a number of epochs, at least 0, got {epochs!r}")
    return round(epochs * epoch_steps)
