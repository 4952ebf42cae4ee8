"""When and how operations take part in autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def wanted(tensors: Sequence[Tensor]) -> bool:
    """Say whether somebody may ask for gradients of what is made of ``tensors``."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def applied(function: type[torch.autograd.Function], *args: object) -> Any:
    """Return what ``function`` returns, which can be differentiated; a tuple is one still."""
    return function.apply(*args)
