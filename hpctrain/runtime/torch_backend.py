"""The backend ``hpctrain`` of torch.distributed: its groups are ranks of the world.

Imported with torch, by the entry point ``torch.backends``: other modules are imported when a group
is made.
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
    """Make a group of the ranks that torch names, all of the world for none. Collective."""
    return imported("hpctrain.runtime.torch_groups:create")(options)


def _find_ranks(timeout: timedelta) -> "tuple[Store, int, int]":
    """Join the world of all ranks, and make a store for them. Collective."""
    found: tuple[Store, int, int] = imported("hpctrain.runtime.torch_groups:find_ranks")(timeout)
    return found
