"""The method that a configuration names, built, and what it tells about itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpctrain.async_sgd.async_method import AsyncMethod
from hpctrain.async_sgd.downpour import AsyncSGD, Downpour
from hpctrain.async_sgd.stale_synchronous import StaleSynchronous
from hpctrain.compress.by_name import codec_named
from hpctrain.compress.codec import Codec
from hpctrain.core.errors import ConfigError
from hpctrain.core.target import check_arguments
from hpctrain.gradients.optimizer import DistributedOptimizer
from hpctrain.local_sgd.diloco import DiLoCo
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.local_sgd.local_sgd import HierarchicalLocalSGD, LocalSGD, PostLocalSGD
from hpctrain.local_sgd.staged_sgd import StagedSGD
from hpctrain.train.async_exchange import AsyncExchange
from hpctrain.train.config import RunConfig
from hpctrain.train.sync_config import SyncConfig

WITHIN_S = 1.0  # a stop, or a checkpoint by the clock, is known to all ranks after about so long

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


def make_sync(
    config: SyncConfig,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    epoch_steps: int,
    num_steps: int,
    seed: int = 0,
) -> LocalMethod | AsyncExchange | None:
    """Hook a plain optimizer as ``[sync]`` says; None for the synchronous method. Collective.

    Ranks of rounds are drawn by ``seed``. Raises ``ConfigError``: the method does not take these
    arguments; on every rank.
    """
    if not config.is_local:
        return None
    if config.is_async:
        kind_of, name = _ASYNC[config.method]
        check_arguments(kind_of, 2, {name: config.staleness, **config.args}, "sync.args")
        with _refusing(config.method):
            # The classes differ in their arguments, which were checked.
            method: Any = kind_of
            return AsyncExchange(
                method(model, optimizer, **config.args, **{name: config.staleness})
            )
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


def describe(config: SyncConfig) -> str:
    """Say in a line how the ranks agree, for people."""
    if config.is_async:
        return f"{config.method}, staleness {config.staleness}"
    how = "" if config.compression == "none" else f", which travels as {config.compression}"
    rounds = "rounds of a measured length" if config.steps == "auto" else f"steps {config.steps}"
    drawn = "" if config.fraction == 1 else f", {config.fraction:g} of the ranks in each round"
    pull = "" if not config.proximal else f", proximal {config.proximal:g}"
    return f"{config.method}, {rounds}{drawn}{pull}{how}"


def summary(config: SyncConfig) -> dict[str, Any]:
    """Return what the first record of a part says about the method."""
    if config.is_async:
        return {"method": config.method, "staleness": config.staleness}
    return {"method": config.method, "steps": config.steps, "compression": config.compression}


def figures(sync: LocalMethod | AsyncExchange) -> dict[str, Any]:
    """Return what records say about rounds; the same on every rank."""
    facts = sync.facts
    if isinstance(sync, AsyncExchange):
        return facts
    phase = {"sync_phase": facts["phase"]} if "phase" in facts else {}
    return {
        "rounds": facts["rounds"],
        "sync_steps": facts["steps"],
        "drift": facts["drift"],
        "bytes_sent": facts["bytes_sent"],
        "bytes_saved": facts["bytes_saved"],
        **phase,
    }


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
