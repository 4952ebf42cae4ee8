"""Derivatives of operations, for autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.collectives.operation_arguments import controller_of
from hpctrain.negotiation.request import Request
from hpctrain.runtime.process_sets import ProcessSet


def wanted(tensors: Sequence[Tensor]) -> bool:
    """Say whether somebody may ask for gradients of what is made of ``tensors``."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def applied(function: type[torch.autograd.Function], *args: object) -> Any:
    """Return what ``function`` returns, which can be differentiated; a tuple is one still."""
    return function.apply(*args)


def carried_out(
    function: type[torch.autograd.Function],
    request: Request,
    tensors: Sequence[Tensor],
    process_set: ProcessSet | None,
) -> list[Tensor]:
    """Return the result of a request, which can be differentiated where that may be wanted.

    Args:
        function: runs the request; of ``(request, process_set, *tensors)``.
        request: what to do with ``tensors``.
        tensors: of the request.
        process_set: the ranks that take part.
    """
    if wanted(tensors):
        return list(applied(function, request, process_set, *tensors))
    return controller_of(process_set).run(request)
