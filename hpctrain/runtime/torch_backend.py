"""The backend ``hpctrain`` of torch.distributed, whose groups consist of ranks of the world.

The entry point ``torch.backends`` imports this module with torch, so other modules are imported
only when a group is created.
"""

from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.core.lazy import imported
from hpctrain.core.logs import logger

if TYPE_CHECKING:
    from hpctrain.core.torch_compat import Store


def register() -> None:
    """Register the backend ``hpctrain`` of torch.distributed. A second call has no effect.

    ``import torch`` calls this function in every program, so a torch without the names that the
    backend needs gives a warning instead of an error.
    """
    try:
        rendezvous = import_module("hpctrain.comm.process_group.rendezvous")
    except (ImportError, AttributeError) as error:
        logger.warning(f"torch {torch.__version__} has no backend hpctrain: {error}")
    else:
        rendezvous.register(_create, _find_ranks)


def _create(options: Any, _: object = None) -> Any:
    """Create a group of the ranks that torch passes; of all ranks if none. Collective."""
    return imported("hpctrain.runtime.torch_groups:create")(options)


def _find_ranks(timeout: timedelta) -> "tuple[Store, int, int]":
    """Join the world of all ranks, and create a store for them. Collective."""
    found: tuple[Store, int, int] = imported("hpctrain.runtime.torch_groups:find_ranks")(timeout)
    return found
