"""The backend ``hpctrain`` of torch.distributed: its groups are ranks of the world.

``import torch`` loads this module, by the entry point ``torch.backends``. The first group loads
the other modules that the backend needs.
"""

from importlib import import_module
from typing import Any

import torch

from hpctrain.core.logs import logger

_GROUPS = "hpctrain.runtime.torch_groups"


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


def _create(*arguments: Any) -> Any:
    return import_module(_GROUPS).create(*arguments)


def _find_ranks(*arguments: Any) -> Any:
    return import_module(_GROUPS).find_ranks(*arguments)
