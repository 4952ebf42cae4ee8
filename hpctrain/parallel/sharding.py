"""ZeRO stages 1 to 3 with torch's FSDP2."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, Rprop

from hpctrain.comm.agreement import raise_if_any
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import (
    drop_gathered,
    gather_asynchronously,
    has_cpu_streams,
    require,
)
from hpctrain.gradients.elementwise import is_known_as
from hpctrain.parallel.dtensor import local
from hpctrain.parallel.guard import guarded
from hpctrain.parallel.mesh import build_mesh
from hpctrain.parallel.mesh_agreement import gathered, require_identical, signature_of
from hpctrain.parallel.offload import FileState
from hpctrain.parallel.sharded_optimizer import Gradients, ShardedOptimizer, upgraded
from hpctrain.parallel.split import names_like, places_of

_MASTER_BYTES = 4
_LISTS = (nn.ModuleList, nn.ModuleDict)


def shard(  # noqa: PLR0913 - independent options
    model: nn.Module,
    optimizer: Optimizer,
    *,
    stage: int,
    mesh: DeviceMesh | None = None,
    layers: Sequence[str] | None = None,
    compute_dtype: torch.dtype | None = None,
    offload: str | None = None,
) -> ShardedOptimizer:
    """Divide a model and its optimizer state among ranks, in place. Collective over the mesh.

    Forward and backward gather the parameters of one layer at a time. Backward averages the
    gradients; each rank stores the part of them that its optimizer updates. The stage determines
    which tensors each rank stores completely, and therefore the memory. The list shows these
    tensors and the maximum number of bytes per parameter element, with Adam, a 16-bit
    ``compute_dtype`` and N ranks, without activations and the layer in use:

    1. complete parameters from forward to backward, and complete gradients inside ``no_sync()``:
       4 + 12 / N bytes;
    2. complete parameters from forward to backward: 2 + 12 / N bytes, or 2 + 16 / N bytes with
       gradient accumulation;
    3. no complete tensors: 16 / N bytes.

    Args:
        model: module with the same structure on all ranks; forward must run the same layers on
            all ranks. The parameter values of rank 0 are used. A tensor parallel model can be
            sharded along another axis.
        optimizer: optimizer of parameters of the model, which must update each element separately;
            may already have state. A custom class needs the attribute ``elementwise = True``.
        stage: 1, 2 or 3.
        mesh: one axis for shards, or two axes for replicas and shards (HSDP), as from
            ``hybrid_mesh()``; by default all ranks.
        layers: names of the modules that are gathered together; ``*`` matches any text. By
            default the members of the outermost ``nn.ModuleList`` and ``nn.Sequential`` modules.
        compute_dtype: dtype of forward and backward; parameters and state are then stored in
            float32 or wider. None to compute in the dtype of the parameters.
        offload: ``"cpu"`` to store and update parameters and state in host memory, or a folder on
            a local disk to store them in a file, for ranks on CPUs; None for the memory of the
            device.

    Returns:
        The optimizer, whose state and parameters are ``DTensor`` objects.

    Raises:
        ConfigError: an argument is invalid; on every rank.
        MismatchError: the ranks have different models or arguments; on every rank.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
    Differs: in stages 1 and 2 backward frees parameters while it stores gradients, in float32.
    """
    mesh = build_mesh()["dp"] if mesh is None else mesh
    require("shard() on CPUs", mesh.device_type != "cpu" or has_cpu_streams, "2.7")
    names = {parameter: name for name, parameter in model.named_parameters()}
    chosen = _Choice(stage, mesh, layers, compute_dtype, offload)
    units, file = _checked(model, optimizer, names, chosen)
    _distribute(model, units, chosen)
    new = dict(model.named_parameters())
    _move(optimizer, names, new)
    if file:
        file.take_over()
    guarded(model).num_flags = 2 + len(new)
    return upgraded(optimizer, Gradients(model, stage), file)


class _Choice(NamedTuple):
    """Arguments of ``shard``."""

    stage: int
    mesh: DeviceMesh
    layers: Sequence[str] | None
    compute_dtype: torch.dtype | None
    offload: str | None


def _checked(
    model: nn.Module, optimizer: Optimizer, names: Mapping[nn.Parameter, str], chosen: _Choice
) -> tuple[list[nn.Module], FileState | None]:
    """Check the arguments of ``shard``; return the modules to gather, and the offload file.

    Collective; raises on all ranks or none.
    """
    units, file, refusal = [], None, None
    stage, mesh, layers, compute_dtype, offload = chosen
    try:
        _check(model, optimizer, chosen)
        units = _units(model, layers)
        _check_parameters(model, optimizer, compute_dtype)
        if offload not in (None, "cpu"):
            masters = torch.float32 if compute_dtype else None
            file = FileState(optimizer, offload, mesh.size(-1), masters)
    except ConfigError as error:
        refusal = str(error)
    raise_if_any(gathered(refusal, mesh), ConfigError)
    lines = [f"stage {stage}, compute_dtype {compute_dtype}, layers {layers}, file {bool(file)}"]
    lines += signature_of(model)
    lines += [" ".join(names[p] for p in group["params"]) for group in optimizer.param_groups]
    remedy = "pass the same model and arguments on all ranks"
    require_identical(mesh, lines, "the model and arguments of shard()", remedy)
    return units, file


def _distribute(model: nn.Module, units: Sequence[nn.Module], chosen: _Choice) -> None:
    """Shard ``model`` with the values of the first rank of the mesh. Collective."""
    stage, mesh, _, compute_dtype, offload = chosen
    model.to(mesh.device_type)
    for parameter in model.parameters():
        if compute_dtype and parameter.is_floating_point() and parameter.itemsize < _MASTER_BYTES:
            parameter.data = parameter.data.float()
    for tensor in (*model.parameters(), *model.buffers()):
        _broadcast(tensor, mesh)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype)}
    if offload and mesh.device_type != "cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    for unit in reversed(units):
        fully_shard(unit, reshard_after_forward=stage == 3, **options)
    # By default FSDP2 keeps the root module's parameters complete until backward, also in stage 3.
    rest: dict[str, Any] = {} if stage == 3 else {"reshard_after_forward": False}
    fully_shard(model, **options, **rest)
    if mesh.device_type == "cpu":  # on GPUs FSDP2 gathers in a separate stream
        _gather_ahead(model, units)


def _gather_ahead(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Make each layer gather its parameters while the previous layer computes."""
    sharded = [unit for unit in (model, *units) if isinstance(unit, FSDPModule)]
    for unit, following in pairwise(sharded[1:]):
        unit.set_modules_to_forward_prefetch([following])
    for unit in sharded:
        gather_asynchronously(unit)

    def forget(*_: object) -> None:
        """Drop gathered parameters that this forward did not use; a step would outdate them."""
        for unit in sharded:
            drop_gathered(unit)

    model.register_forward_hook(forget, always_call=True)


def _check(model: nn.Module, optimizer: Optimizer, chosen: _Choice) -> None:
    """Raise ``ConfigError`` if ``shard`` does not support its arguments."""
    stage, mesh, _, _, offload = chosen
    if offload not in (None, "cpu") and mesh.device_type != "cpu":
        raise ConfigError(
            f"offload to a folder must be used with ranks on CPUs, got a mesh on "
            f'{mesh.device_type}; use offload="cpu"'
        )
    if stage not in (1, 2, 3):
        raise ConfigError(f"the stage of shard() must be 1, 2 or 3, got {stage!r}")
    if mesh.ndim > 2:
        raise ConfigError(
            f"the mesh of shard() must have one or two axes, got {mesh.ndim} axes; pass a part of "
            f'the mesh, such as mesh["dp"]'
        )
    if any(isinstance(one, DistributedDataParallel | FSDPModule) for one in model.modules()):
        raise ConfigError(
            f"the model of shard() must not average gradients itself, but modules of "
            f"{type(model).__name__} do; remove fully_shard() or DistributedDataParallel"
        )
    if isinstance(optimizer, Rprop) or not is_known_as("elementwise", optimizer):
        raise ConfigError(
            f"the optimizer of shard() must be elementwise, got {type(optimizer).__name__}; use "
            f"another optimizer of torch.optim, such as AdamW, or set elementwise = True in your "
            f"class"
        )


def _check_parameters(
    model: nn.Module, optimizer: Optimizer, compute_dtype: torch.dtype | None
) -> None:
    """Check the parameters of model and optimizer, and the state of the optimizer.

    Raise ``ConfigError`` if torch cannot shard one of them, or if the optimizer has a parameter
    that is not in the model.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := sum(p not in names for p in held):
        raise ConfigError(
            f"the optimizer of shard() must have parameters of the model only, got {unknown} "
            f"others; create the optimizer with model.parameters()"
        )
    for module_name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ConfigError(
                f"gradients of shard() must be dense, got sparse=True in {module_name}; omit "
                f"sparse"
            )
    for parameter, name in names.items():
        if parameter.is_meta or not parameter.ndim or not parameter.is_contiguous():
            raise ConfigError(
                f"a parameter of shard() must have values, at least one dimension and "
                f"contiguous memory, but {name} has shape {tuple(parameter.shape)} and "
                f"stride {parameter.stride()} on {parameter.device}; convert the parameter before "
                f"shard(), for example with reshape(1) or contiguous()"
            )
    kinds = {p.dtype for p in names if p.requires_grad}
    if len(kinds) > 1 and not (compute_dtype and all(kind.itemsize <= 4 for kind in kinds)):
        raise ConfigError(
            f"parameters of shard() must have one dtype, got "
            f"{', '.join(sorted(map(str, kinds)))}; convert the model, or use "
            f"compute_dtype=torch.bfloat16"
        )
    for parameter in held:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise ConfigError(
                    f"optimizer state must have the shape of its parameter in shard(), "
                    f"but {key} of {names[parameter]} has shape {tuple(value.shape)}; "
                    f"call shard() before the first step"
                )


def _units(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules to shard, outer modules first.

    The parameters of each of these modules are gathered together. Modules that share parameters
    with other modules are excluded; the root module gathers their parameters.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if names is None:
        found = dict.fromkeys(_members(model))
    else:
        chosen = {one for name in names for one in names_like(name, modules)}
        found = dict.fromkeys(module for name, module in modules.items() if name in chosen)
    holders = {p: {module for module, _ in places} for p, places in places_of(model).items()}
    units = []
    for unit in found:
        inside, parameters = set(unit.modules()), list(unit.parameters())
        if parameters and all(holders[parameter] <= inside for parameter in parameters):
            units.append(unit)
    return units


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost module lists and ``nn.Sequential`` modules."""
    for child in module.children():
        if isinstance(module, (*_LISTS, nn.Sequential)) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _members(child)


@torch.no_grad()
def _broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Copy ``tensor`` from the first rank of the mesh to all others. Collective."""
    here = local(tensor)
    sent = here.detach().contiguous()
    for dim in reversed(range(mesh.ndim)):
        dist.broadcast(sent, group=mesh.get_group(dim), group_src=0)
    if sent.data_ptr() != here.data_ptr():
        here.copy_(sent)


@torch.no_grad()
def _move(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], new: Mapping[str, nn.Parameter]
) -> None:
    """Replace the parameters of ``optimizer`` by their shards, and shard its state."""
    following: dict[Any, Any] = {parameter: new[name] for parameter, name in names.items()}
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
