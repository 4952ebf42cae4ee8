"""Labels that a loss of torch takes, told before torch stops with a trace."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpctrain.core.errors import DataError

_OF_CLASSES = ("cross_entropy", "nll_loss")
"""Losses of torch.nn.functional whose whole-numbered labels are numbers of classes."""


def checking(loss: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``function`` with labels that are looked at first, where ``loss`` is choosy."""
    if loss not in _OF_CLASSES:
        return function

    def checked(output: Tensor, label: Tensor, **args: object) -> Tensor:
        check_label(loss, label.dtype)
        return function(output, label, **args)

    return checked


def check_label(loss: str, dtype: torch.dtype) -> None:
    """Raise a ``DataError`` if the loss does not take labels of this type."""
    is_taken = dtype.is_floating_point or dtype in (torch.int64, torch.uint8)
    if loss in _OF_CLASSES and not is_taken:
        raise DataError(
            f'loss.target = "{loss}" takes numbers of classes as int64 or uint8, got labels of '
            f"type {str(dtype).removeprefix('torch.')}; write them so, or convert them in "
            f"data.transform"
        )


def dtype_of(name: str) -> torch.dtype:
    """Return torch's type for numpy's name of it."""
    return torch.from_numpy(np.empty(0, np.dtype(name))).dtype
