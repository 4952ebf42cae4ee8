"""What ranks of a mesh have of tensors and models, and tell each other of it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.comm.agreement import require_equal_by
from hpctrain.comm.norms import total_norm
from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import ConfigError
from hpctrain.core.target import hint


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, which shares its memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Collective over the ranks that have parts of it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def gathered(one: object, mesh: DeviceMesh | None = None) -> list[Any]:
    """Return the objects of all ranks of a mesh, or of all there are. Collective."""
    found = [one]
    for group in [None] if mesh is None else mesh.get_all_groups():
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group=group)
        found = [item for part in parts for item in part]
    return found


def require_alike(mesh: DeviceMesh | None, lines: Sequence[str], what: str, *way_out: str) -> None:
    """Raise ``MismatchError`` on all ranks unless they give the same lines. Collective."""
    require_equal_by(partial(gathered, mesh=mesh), lines, what, *way_out)


def form_of(model: nn.Module) -> list[str]:
    """Return a line for each parameter, by which ranks see whether they have the same model."""
    return [
        f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    ]


def digest(tensor: Tensor) -> str:
    """Say in short what a tensor is, and what it holds."""
    return f"{tuple(tensor.shape)} {tensor.dtype}, crc32 {crc32(host_bytes(tensor)):08x}"


def names_like(pattern: str, names: Iterable[str], *, same_depth: bool = False) -> list[str]:
    """Return the names of modules in which ``*`` stands for anything, or for any one part.

    Raises ``ConfigError``: there is none.
    """
    found = [
        name
        for name in names
        if fnmatchcase(name, pattern)
        and not (same_depth and name.count(".") != pattern.count("."))
    ]
    if not found:
        raise ConfigError(f"the model has no module {pattern}{hint(pattern, names)}")
    return found


def places_of(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return in which modules each parameter lies, and under which name."""
    places = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module, name))
    return places


def norm_of(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients, of which ranks may have parts. Collective over them."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        alike[getattr(gradient, "device_mesh", None), gradient.dtype].append(gradient)
    norms = [total_norm(some, norm_type, whole) for some in alike.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]), norm_type)
    return total


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip gradients, of which ranks may have parts; return their norm before. Collective."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    total = norm_of([p.grad for p in held if p.grad is not None], norm_type)
    nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total
