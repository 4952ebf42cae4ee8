"""Local and full values, norms and clipping of tensors that may be ``DTensor`` objects."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.norms import total_norm


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a ``DTensor`` without a copy; other tensors unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def whole(tensor: Tensor) -> Tensor:
    """Return the full value of ``tensor``. Collective over the ranks that have shards."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def norm_of(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all ``gradients``. Collective over the ranks that have shards."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        kinds[getattr(gradient, "device_mesh", None), gradient.dtype].append(gradient)
    norms = [total_norm(some, norm_type, whole) for some in kinds.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]), norm_type)
    return total


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip gradients by their norm; return the unclipped norm. Collective like ``norm_of``."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    total = norm_of([p.grad for p in held if p.grad is not None], norm_type)
    nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total
