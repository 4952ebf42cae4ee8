"""Comparison of models and tensors between the ranks of a mesh."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.comm.agreement import require_equal_by
from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.checksum import crc32


def gathered(item: object, mesh: DeviceMesh | None = None) -> list[Any]:
    """Return the items of all ranks of ``mesh``, or of all ranks if it is None. Collective."""
    found = [item]
    for group in [None] if mesh is None else mesh.get_all_groups():
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, found, group=group)
        found = [each for some in lists for each in some]
    return found


def require_identical(
    mesh: DeviceMesh | None, lines: Sequence[str], what: str, *remedy: str
) -> None:
    """Raise ``MismatchError`` on all ranks unless all ranks pass the same lines. Collective."""
    require_equal_by(partial(gathered, mesh=mesh), lines, what, *remedy)


def signature_of(model: nn.Module) -> list[str]:
    """Return a line for each parameter: name, shape and dtype; ``frozen`` if it is not trained."""
    return [
        f"{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    ]


def digest(tensor: Tensor) -> str:
    """Return shape, dtype and checksum of a tensor as text."""
    return f"{tuple(tensor.shape)} {tensor.dtype}, crc32 {crc32(host_bytes(tensor)):08x}"
