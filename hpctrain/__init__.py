"""Train PyTorch models across the nodes of a supercomputer, under plain ``mpirun`` or ``srun``.

Importing this package loads neither torch nor MPI: every name below is loaded at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hpctrain.runtime.functions import (
        Average,
        Sum,
        allreduce,
        allreduce_,
        barrier,
        broadcast_,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from hpctrain.runtime.run import run
    from hpctrain.runtime.world import (
        cross_rank,
        cross_size,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )
    from hpctrain.sync.optimizer import DistributedOptimizer

_HOME = {
    "hpctrain.runtime.functions": (
        "Average",
        "Sum",
        "allreduce",
        "allreduce_",
        "barrier",
        "broadcast_",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
    ),
    "hpctrain.runtime.run": ("run",),
    "hpctrain.runtime.world": (
        "cross_rank",
        "cross_size",
        "init",
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
    ),
    "hpctrain.sync.optimizer": ("DistributedOptimizer",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Sum",
    "__version__",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "run",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    """Load a public name at its first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
