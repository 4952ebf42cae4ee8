"""Model, optimizer and schedule of a configuration."""

import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler

from hpctrain.checkpoint.inspection import load_newest
from hpctrain.core.errors import ConfigError
from hpctrain.core.logs import logger
from hpctrain.core.target import call, check_arguments, member, resolve
from hpctrain.core.torch_compat import accelerator
from hpctrain.core.user_error import noted
from hpctrain.gradients.elementwise import can_shard
from hpctrain.optim.groups import EXEMPTIONS, matched, parameter_groups
from hpctrain.optim.lamb import LAMB
from hpctrain.optim.lars import LARS
from hpctrain.optim.learning_rates import InverseTimeLR, linear_scaling, square_root_scaling
from hpctrain.optim.optimizer_config import OptimizerConfig
from hpctrain.parallel.parallel_config import ParallelConfig
from hpctrain.parallel.recomputation import recompute
from hpctrain.parallel.split import layers_of
from hpctrain.train.run_config import ModelConfig, RunConfig, TrainingConfig
from hpctrain.train.stateful import Precision
from hpctrain.train.tables import Tables

EMA = "ema"
"""Key of a checkpoint: state dict of the model with averaged weights."""

_PARTS = (EMA, "model", "state_dict", "model_state_dict")
"""Keys under which a file or a checkpoint may contain the weights."""
_PREFIXES = ("module.", "_orig_mod.")  # DistributedDataParallel and torch.compile add these
_UNREADABLE = (pickle.UnpicklingError, safetensors.SafetensorError)
_MOST_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """Model and optimizer of a configuration, before an exchange wraps them."""

    model: nn.Module
    optimizer: Optimizer  # plain, without state
    loss: Callable[[Tensor, Tensor], Tensor]  # mean over the samples of a batch
    precision: Precision  # precision of forward and loss
    tables: Tables  # embeddings whose rows are divided among the ranks
    epoch_steps: int  # steps per epoch


def make_model(config: ModelConfig) -> nn.Module:
    """Call ``model.target`` with ``model.args``, and return the model.

    Raises:
        ConfigError: the target cannot be called, or does not return a ``torch.nn.Module``.
    """
    target = resolve(config.target, "model.target")
    with noted(f'model.target = "{config.target}"'):
        model = call(target, (), config.args, "model.args")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.target must return a torch.nn.Module, but {config.target} returned "
            f"{type(model).__name__}; return the module"
        )
    return model


def load_first_weights(model: nn.Module, config: ModelConfig) -> None:
    """Load initial weights from the path ``model.init_from`` into the model. Local.

    Raises:
        ConfigError: the weights cannot be read, or do not match the model.
        CheckpointError: a checkpoint is damaged.
    """
    want = model.state_dict()
    have = _read(Path(config.init_from))
    for prefix in _PREFIXES:
        if have and all(name.startswith(prefix) for name in have):
            have = {name.removeprefix(prefix): value for name, value in have.items()}
    # Convert tensors to the dtypes of the model.
    have = {name: v.to(want[name].dtype) if name in want else v for name, v in have.items()}
    fits = {n: v for n, v in have.items() if n in want and v.shape == want[n].shape}
    if lines := misfits(have, want):
        more = len(lines) - _MOST_LINES
        lines[_MOST_LINES:] = [f"and {more} more"] if more > 0 else []
        description = f'"{config.init_from}" fits {len(fits)} of {len(want)} tensors'
        text = "\n  ".join(lines)
        if config.init_strict or not fits:
            raise ConfigError(
                f"model.init_from must fit all tensors of the model, but {description}; build the "
                f"model that was saved, or load the fitting tensors with "
                f"model.init_strict = false:\n  {text}"
            )
        logger.warning(
            f"model.init_from = {description}, the others keep their initial values:\n  {text}"
        )
    model.load_state_dict(fits, strict=False)


def _read(path: Path) -> dict[str, Tensor]:
    if path.is_dir():
        state: Any = load_newest(path)[1].state
    else:
        try:
            if path.suffix == ".safetensors":
                state = load_file(path)
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
        # pickle, zip and torch raise one of these errors for a file of another format.
        except (OSError, RuntimeError, ValueError, LookupError, EOFError, *_UNREADABLE) as error:
            message = str(error).partition("\n")[0]
            if isinstance(error, pickle.UnpicklingError):  # torch's text is too long
                message = "the file contains objects other than tensors"
            raise ConfigError(
                f'model.init_from = "{path}" cannot be read: {message}; name a run directory, a '
                f"checkpoint, or a file of torch.save or safetensors with a state dict"
            ) from error
    found = isinstance(state, Mapping)
    inner = (state[n] for n in _PARTS if found and isinstance(state.get(n), Mapping) and state[n])
    part = next(inner, state)
    if not isinstance(part, Mapping) or not all(isinstance(v, Tensor) for v in part.values()):
        raise ConfigError(
            f'model.init_from = "{path}" must contain a state dict, directly or as '
            f"{', '.join(_PARTS)}, but has none; save model.state_dict()"
        )
    return dict(part)


def misfits(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Compare the tensors ``have`` with the expected ones, ``want``; return one line per fault.

    A fault is a missing tensor, an unexpected tensor, or a tensor with another shape or dtype.
    """
    found, wanted = (
        {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in of.items()}
        for of in (have, want)
    )
    lines = [
        f"{name}: {found.get(name, 'missing')}, expected {what}"
        for name, what in wanted.items()
        if found.get(name) != what
    ]
    return lines + [
        f"{name}: {what}, not in the model" for name, what in found.items() if name not in wanted
    ]


def choose_device(config: TrainingConfig, num_devices: int) -> tuple[torch.device, str]:
    """Return the device of the model, and the reason for the choice. Local.

    Args:
        config: table ``[train]``; its key ``device`` is the request.
        num_devices: number of accelerators of the rank that has the fewest.

    Returns:
        The device, and the reason as text; the text is empty if some rank has no accelerator.

    Raises:
        ConfigError: this rank does not have the configured device.
    """
    here = accelerator()
    kind, cpu = here.type if here is not None else "", torch.device("cpu")
    if config.device not in {"auto", "cpu", kind}:
        raise ConfigError(
            f"train.device must be auto, cpu{kind and f' or {kind}'} on this rank, got "
            f"{config.device!r}; torch {torch.__version__} finds no other device"
        )
    if not num_devices or not kind:
        if config.device == kind:
            raise ConfigError(
                f"every rank must have a device for train.device = {kind!r}, but some ranks have "
                f"none; request GPUs, as with #SBATCH --gpus-per-node, or set train.device = cpu"
            )
        return cpu, ""
    refused = {
        "train.device is cpu": config.device == "cpu",
        "train.reproducible is implemented on CPUs only": config.reproducible,
        "train.shard = node uses memory of the host, use parallel.zero": config.shard == "node",
    }
    if reason := next((text for text, holds in refused.items() if holds), ""):
        return cpu, f"cpu, although every rank has {kind}: {reason}"
    return torch.device(kind, torch.accelerator.current_device_index()), kind


def prepare(model: nn.Module, run: RunConfig) -> None:
    """Apply activation checkpointing and ``torch.compile`` in place, if configured.

    The names in the state dict of the model do not change.
    """
    config = run.train
    _recompute_layers(model, run.parallel)
    modules = {name: module for name, module in model.named_modules() if name}
    chosen = matched(config.activation_checkpointing, [*modules], "train.activation_checkpointing")
    for name in chosen:
        outer = (name[:end] for end, char in enumerate(name) if char == ".")
        if not any(each in chosen for each in outer):  # the outer module includes its children
            recompute(model, [name])
    if not config.compile:
        return
    # Without dynamic shapes, a kernel does not depend on the shapes of earlier inputs.
    args = {"dynamic": False, **config.compile_args}
    check_arguments(torch.compile, 1, args, "train.compile_args")
    try:
        model.compile(**args)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"train.compile_args must be valid, but torch.compile refuses: {error}"
        ) from error


def division_of(model: nn.Module, what: str, given: Any) -> Any:
    """Return the roles or layers by which a model is divided among ranks.

    Args:
        model: may have an attribute ``parallel_roles`` or ``parallel_layers``.
        what: ``roles`` or ``layers``.
        given: value of the key in ``[parallel]``; takes precedence over the attribute.

    Raises:
        ConfigError: neither the key nor the attribute is set.
    """
    found = given or getattr(model, f"parallel_{what}", None)
    if not found:
        raise ConfigError(
            f"the division of a model must be defined by parallel.{what} or by an attribute "
            f"parallel_{what} of {type(model).__name__}, but neither is set; set one of them "
            f"(hpctrain guide parallel)"
        )
    return found


def _recompute_layers(model: nn.Module, config: ParallelConfig) -> None:
    """Recompute activations in backward, for all layers except the first and the last."""
    if config.recompute != "none":
        layers = layers_of(model, division_of(model, "layers", config.layers))[1:-1]
        recompute(model, [name for name, _ in layers], selective=config.recompute == "selective")


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Build the optimizer, with one parameter group per set of optimizer arguments.

    Raises:
        ConfigError: the optimizer or its arguments are invalid.
    """
    kind = _optimizer_class(config.name)
    if signature(kind.step).parameters["closure"].default is Parameter.empty:
        raise ConfigError(
            f"optimizer.name must be an optimizer that uses one gradient per step, but "
            f"{config.name} computes several; choose another optimizer, or write your own loop"
        )
    args = {**config.args, "lr": config.lr}
    exempt = dict(EXEMPTIONS) if config.exempt_norms_and_biases else {}
    if "adapt" not in signature(kind).parameters:
        exempt.pop("adapt", None)
    groups = parameter_groups(model, config.groups, exempt, "optimizer.groups")
    for group in groups:
        if own := {name: value for name, value in group.items() if name != "params"}:
            check_arguments(kind, 1, {**args, **own}, "optimizer.groups")
    try:
        optimizer = call(kind, (groups,), args, "optimizer.args")
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.args must be valid, but {config.name} refuses: {error}"
        ) from error
    assert isinstance(optimizer, Optimizer)
    return optimizer


def _optimizer_class(name: str) -> Any:
    """Return the class for ``optimizer.name``, or raise ``ConfigError``."""
    own = {"LARS": LARS, "LAMB": LAMB}
    kind = own[name] if name in own else member(torch.optim, name, "optimizer.name")
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(
            f"optimizer.name must be a class of torch.optim, {' or '.join(own)}, got {name!r}"
        )
    return kind


def _constant(optimizer: Optimizer, num_steps: int) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ConstantLR(optimizer, 1.0, num_steps)


def _linear(optimizer: Optimizer, num_steps: int, final: float = 0.0) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 1.0, final, num_steps)


def _cosine(optimizer: Optimizer, num_steps: int, final: float = 0.0) -> lr_scheduler.LRScheduler:
    peak = optimizer.param_groups[0]["lr"]
    return lr_scheduler.CosineAnnealingLR(optimizer, num_steps, final * peak)


def _poly(optimizer: Optimizer, num_steps: int, power: float = 2.0) -> lr_scheduler.LRScheduler:
    return lr_scheduler.PolynomialLR(optimizer, num_steps, power)


_DECAYS: Mapping[str, Callable[..., lr_scheduler.LRScheduler]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "poly": _poly,
    "inverse_time": InverseTimeLR,
}
_SCALINGS = {"linear": linear_scaling, "square_root": square_root_scaling}


def make_schedule(run: RunConfig, epoch_steps: int) -> Callable[[int], float]:
    """Return a function that maps the index of a step, from 0, to a factor of ``optimizer.lr``.

    Args:
        run: configuration.
        epoch_steps: steps per epoch.

    Raises:
        ConfigError: the schedule or its arguments are invalid.
    """
    config = run.schedule
    if config.name not in _DECAYS:
        raise ConfigError(
            f"schedule.name must be one of {', '.join(_DECAYS)}, got {config.name!r}"
        )
    peak = 1.0
    if config.base_batch:
        peak = _SCALINGS[config.scaling](config.base_batch, run.train.global_batch)
    one = SGD([torch.zeros(1)], lr=peak)  # the learning rate of this optimizer is the factor
    warmup = round(config.warmup_epochs * epoch_steps)
    first = one, max(run.train.epochs * epoch_steps - warmup, 1)
    try:
        schedule = call(_DECAYS[config.name], first, config.args, "schedule.args")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"schedule.args must be valid, but {config.name} refuses: {error}"
        ) from error
    if warmup:
        start = 1 / peak if peak > 1 else 1 / (warmup + 1)
        rise = lr_scheduler.LinearLR(one, start, 1.0, warmup)
        schedule = lr_scheduler.SequentialLR(one, [rise, schedule], [warmup])
    one.step()  # torch warns if a schedule steps before its optimizer
    factors = array("d")

    def at(step: int) -> float:
        while len(factors) <= step:
            factors.append(one.param_groups[0]["lr"])
            schedule.step()
        return factors[step]

    return at


def with_shard(
    config: RunConfig, model: nn.Module, optimizer: Optimizer, local_sizes: Sequence[int]
) -> tuple[RunConfig, str]:
    """Resolve ``train.shard = "auto"``. Local, with identical results on all ranks.

    Args:
        config: configuration of the run.
        model: model of this rank.
        optimizer: optimizer of this rank.
        local_sizes: number of ranks per node, for each node whose ranks share memory.

    Returns:
        The configuration with ``train.shard`` set to ``node`` or ``none``, and the reason as text.
        If ``train.shard`` is not ``auto``, the configuration is unchanged and the text empty.
    """
    train, most = config.train, max(local_sizes, default=1)
    if train.shard != "auto":
        return config, ""
    devices = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    refused = {
        f"parameters are on {'/'.join(devices)}": bool(devices),
        "no node has two ranks that share memory": most < 2,
        "train.reproducible sums gradients differently": train.reproducible,
        "ranks divide the model according to [parallel]": config.parallel.divides,
        f"sync.method is {config.sync.method}": config.sync.is_local,
        "sync.compression is not none": config.sync.compression != "none",
        "log.noise_scale needs the gradients of single ranks": config.log.noise_scale,
        "a layer has sparse gradients": any(getattr(m, "sparse", False) for m in model.modules()),
        f"{config.optimizer.name} may combine several parameters": not can_shard(optimizer),
    }
    if reason := next((text for text, holds in refused.items() if holds), ""):
        text = f"every rank has all parameters: {reason}"
        return replace(config, train=replace(train, shard="none")), text
    text = f"parameters and state are stored once per node, for up to {most} ranks"
    return replace(config, train=replace(train, shard="node")), text
