"""The torch.distributed backend ``hpctrain``, which creates groups from ranks of the world.

``import torch`` imports this module through the entry point ``torch.backends``. If a module of
hpctrain, such as ``core/torch_compat``, has caused ``import torch``, that module is still
incomplete. So this module postpones imports of modules that need torch until a group is created.
"""

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

from hpctrain.cluster.env import torch_finds_ranks
from hpctrain.core.lazy import imported
from hpctrain.core.logs import logger

NAME = "hpctrain"


def register() -> None:
    """Register the backend ``hpctrain`` of torch.distributed. A second call has no effect.

    Also changes ``env://`` for all backends: if ``MASTER_ADDR`` is not set, MPI finds the ranks,
    where torch alone would raise an error. If torch lacks a name that the backend needs, this
    function logs a warning and raises no error, because ``import torch`` calls the function in
    every program.
    """
    dist: Any = import_module("torch.distributed")
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    try:
        handlers = vars(import_module("torch.distributed.rendezvous"))["_rendezvous_handlers"]
        of_torch, default = handlers["env"], dist.default_pg_timeout
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    except (AttributeError, KeyError) as error:
        version = import_module("torch").__version__
        logger.warning(f"hpctrain cannot register its backend in torch {version}: {error!r}")
        return

    def rendezvous(url: str, timeout: timedelta = default, **options: Any) -> Iterator[Any]:
        if torch_finds_ranks():
            yield from of_torch(url, timeout=timeout, **options)
        else:
            yield imported("hpctrain.runtime.torch_groups:find_ranks")(timeout)

    handlers["env"] = rendezvous


def _create(options: Any, _: object = None) -> Any:
    """Create a group of the ranks that torch passes, or of all ranks. Collective."""
    return imported("hpctrain.runtime.torch_groups:create")(options)
