"""ZeRO in one call: parameters, gradients and optimizer state divided by torch's FSDP2."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, Rprop

from hpctrain.comm.agreement import raise_if_any, require_equal_by
from hpctrain.core.errors import ConfigError
from hpctrain.core.target import hint
from hpctrain.gradients.elementwise import is_known_as
from hpctrain.parallel.mesh import build_mesh
from hpctrain.parallel.offload import FileState
from hpctrain.parallel.sharded_optimizer import (
    Gradients,
    ShardedOptimizer,
    gathered,
    upgraded,
)

_LISTS = (nn.ModuleList, nn.ModuleDict)


def shard(  # noqa: PLR0913 - each is one choice
    model: nn.Module,
    optimizer: Optimizer,
    *,
    stage: int,
    mesh: DeviceMesh | None = None,
    layers: Sequence[str] | None = None,
    compute_dtype: torch.dtype | None = None,
    offload: str | None = None,
) -> ShardedOptimizer:
    """Divide a model and its optimizer's state among ranks, in place. Collective over them.

    Forward and backward gather a layer's parameters when it is its turn, backward averages the
    gradients and leaves each rank its part, and the optimizer steps that part. What stays whole
    in between is the stage:

    ====== ========================================= =========================
    stage  whole on every rank                       bytes, 16-bit parameters
    ====== ========================================= =========================
    1      parameters; gradients inside ``no_sync``  4 P + 12 P / N
    2      parameters, from forward to backward      2 P + 14 P / N
    3      the layer at work                         16 P / N
    ====== ========================================= =========================

    Gradients are those of the mean over the ranks' losses, on any number of ranks; parameters
    that no rank has used keep ``None``. Parameters and state are ``DTensor``s afterwards, which
    ``clip_grad_norm_`` and distributed checkpoints of torch know, in any other layout, too.

    Args:
        model: the same on all ranks, its forward runs the same layers on all. Rank 0's values
            count. Tensor parallel ones may be sharded further.
        optimizer: one that steps every element by itself, with parameters of the model: of
            ``torch.optim`` all but Adafactor, LBFGS, Muon, Rprop and SparseAdam; or a class of
            yours that says so by ``elementwise = True``. It may have a state already.
        stage: 1, 2 or 3.
        mesh: one axis to shard over, or two: the first holds replicas, the second shards
            (HSDP), such as that of ``hybrid_mesh()``. All ranks, unless given.
        layers: names of the modules that are gathered at once; ``*`` stands for anything. The
            members of the outermost ``nn.ModuleList``s and ``nn.Sequential``s, unless given.
        compute_dtype: of forward and backward, such as ``torch.bfloat16``; parameters and state
            are kept and stepped in at least float32.
        offload: ``"cpu"`` keeps the parts of parameters, gradients and state in CPU memory and
            steps there, where ``mesh`` is of another device. A folder on a disk of the node, for
            ranks on CPUs, holds the parts of parameters and state.

    Returns:
        The optimizer, with ``clip_grad_norm_()`` and ``no_sync()`` besides its own methods.

    Raises:
        ConfigError: an argument does not fit; on every rank.
        MismatchError: the ranks have different models or arguments; on every rank.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
    Differs: parameters that stay whole are freed layer by layer in backward.
    """
    mesh = build_mesh()["dp"] if mesh is None else mesh
    units: list[nn.Module] = []
    file, refusal = None, None
    try:
        _check(model, optimizer, stage, mesh, offload)
        units = _units(model, layers)
        _check_parameters(model, optimizer, compute_dtype)
        if offload not in (None, "cpu"):
            masters = torch.float32 if compute_dtype else None
            file = FileState(optimizer, offload, mesh.size(-1), masters)
    except ConfigError as error:
        refusal = str(error)
    raise_if_any(gathered(refusal, mesh), ConfigError)
    arguments = [f"stage {stage}, compute_dtype {compute_dtype}, layers {layers}"]
    require_equal_by(
        lambda one: gathered(one, mesh),
        arguments + [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters()],
        "the model and arguments of shard()",
        "give all ranks the same",
    )
    model.to(mesh.device_type)
    old = dict(model.named_parameters())
    for parameter in old.values():
        if compute_dtype and parameter.is_floating_point() and parameter.itemsize < 4:
            parameter.data = parameter.data.float()
    for tensor in (*old.values(), *model.buffers()):
        _broadcast(tensor, mesh)
    # The root decides by itself to keep its own parameters from forward to backward.
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype)}
    if offload and mesh.device_type != "cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    for unit in reversed(units):
        fully_shard(unit, reshard_after_forward=stage == 3, **options)
    fully_shard(model, reshard_after_forward=None if stage == 3 else False, **options)
    _move(optimizer, old, dict(model.named_parameters()))
    if file:
        file.take_over()
    return upgraded(optimizer, Gradients(model, stage, mesh), file)


def _check(
    model: nn.Module, optimizer: Optimizer, stage: int, mesh: DeviceMesh, offload: str | None
) -> None:
    """Raise unless these can be sharded at all."""
    if offload not in (None, "cpu") and mesh.device_type != "cpu":
        raise ConfigError(
            f"offload to a folder is of ranks on CPUs, got a mesh on {mesh.device_type}; take "
            f'offload="cpu"'
        )
    if stage not in (1, 2, 3):
        raise ConfigError(f"the stage of shard() is 1, 2 or 3, got {stage!r}")
    if mesh.ndim > 2:
        raise ConfigError(
            f"shard() takes a mesh of one axis, or of replicas and shards, got {mesh.ndim} axes; "
            f'take some of it, such as mesh["dp"]'
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "shard() averages gradients itself, got a DistributedDataParallel; pass its .module"
        )
    if isinstance(optimizer, Rprop) or not is_known_as("elementwise", optimizer):
        raise ConfigError(
            f"shard() takes an optimizer that steps every element by itself, got "
            f"{type(optimizer).__name__}; take another one of torch.optim, such as AdamW; a class "
            f"of your own says so by elementwise = True"
        )


def _check_parameters(
    model: nn.Module, optimizer: Optimizer, compute_dtype: torch.dtype | None
) -> None:
    """Raise unless torch can shard every parameter, and the optimizer has no others."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if strange := sum(p not in names for p in held):
        raise ConfigError(
            f"the optimizer of shard() holds parameters of its model alone, got {strange} of "
            f"others; make it of model.parameters()"
        )
    for module_name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ConfigError(
                f"shard() averages dense gradients, got sparse=True in {module_name}; leave it out"
            )
    for parameter, name in names.items():
        if parameter.is_meta or not parameter.ndim or not parameter.is_contiguous():
            raise ConfigError(
                f"a parameter of shard() has values, a dimension and contiguous memory, got {name}"
                f" of shape {tuple(parameter.shape)}, stride {parameter.stride()} on "
                f"{parameter.device}; make it so before, as by reshape(1) or contiguous()"
            )
    kinds = {p.dtype for p in names if p.requires_grad}
    if len(kinds) > 1 and not (compute_dtype and all(kind.itemsize <= 4 for kind in kinds)):
        raise ConfigError(
            f"parameters of shard() have one dtype, got {', '.join(sorted(map(str, kinds)))}; "
            f"convert the model, or say compute_dtype=torch.bfloat16"
        )
    for parameter in held:
        for key, value in (
            optimizer.state[parameter].items() if parameter in optimizer.state else ()
        ):
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise ConfigError(
                    f"state that shard() takes over has the shape of its parameter, got {key} of "
                    f"{tuple(value.shape)} for {names[parameter]}; call shard() before a step"
                )


def _units(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules that are gathered at once, outer ones first.

    Not those that share parameters with others: the whole model's remainder has these.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if names is None:
        found = dict.fromkeys(_members(model))
    else:
        for name in names:
            if not any(fnmatchcase(one, name) for one in modules):
                raise ConfigError(f"the model has no module {name}{hint(name, modules)}")
        chosen = [one for one in modules if any(fnmatchcase(one, name) for name in names)]
        found = dict.fromkeys(modules[name] for name in chosen)
    holders: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter].add(module)
    units = []
    for unit in found:
        inside, parameters = set(unit.modules()), list(unit.parameters())
        if parameters and all(holders[parameter] <= inside for parameter in parameters):
            units.append(unit)
    return units


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of outermost lists of modules."""
    for child in module.children():
        if isinstance(module, (*_LISTS, nn.Sequential)) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _members(child)


@torch.no_grad()
def _broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Take over what the first rank has. Collective."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    sent = local.detach().contiguous()
    for dim in reversed(range(mesh.ndim)):
        dist.broadcast(sent, group=mesh.get_group(dim), group_src=0)
    if sent.data_ptr() != local.data_ptr():
        local.copy_(sent)


@torch.no_grad()
def _move(
    optimizer: Optimizer, old: dict[str, nn.Parameter], new: dict[str, nn.Parameter]
) -> None:
    """Let an optimizer hold the sharded parameters, and its state be sharded as they are."""
    following: dict[Any, Any] = {old[name]: new[name] for name in old}
    for group in optimizer.param_groups:
        group["params"][:] = [following[parameter] for parameter in group["params"]]
    for parameter in [p for p in optimizer.state if p in following]:
        state, target = optimizer.state.pop(parameter), following[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                dtype = torch.promote_types(value.dtype, target.dtype)
                part = distribute_tensor(
                    value, target.device_mesh, target.placements, src_data_rank=None
                )
                state[key] = torch.empty_like(target, dtype=dtype).copy_(part)
        optimizer.state[target] = state
