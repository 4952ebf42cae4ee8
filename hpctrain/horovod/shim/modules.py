"""Table of modules: those of Horovod 0.28.1, and ours behind each of their names."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import hpctrain

VERSION = "0.28.1+hpctrain"
"""What ``horovod.__version__`` says: the version whose names these are, and that it is not it."""

GUIDE = "`hpctrain guide migrate`"

MARK = "__hpctrain_shim__"
"""Attribute by which modules of the shim are known."""

Names = Mapping[str, str]
"""Names of a module, and ``"module:attribute"`` of what stands for each."""


def _names(names: Iterable[str], home: str = "hpctrain") -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_STATES = "hpctrain.elastic"
_HALF = "hpctrain.compress.half"
_OURS = "hpctrain.horovod.shim.functions"

_LOCAL = {"DiLoCo", "HierarchicalLocalSGD", "LocalSGD", "PostLocalSGD", "StagedSGD"}
_ERRORS = {name for name in hpctrain.__all__ if name.endswith("Error")} - {"HorovodInternalError"}
_OWN = {"__version__", "check_replicas", "current", "elastic", "is_homogeneous", "run", "shard"}
_OWN |= _LOCAL | _ERRORS
"""What ``hpctrain`` has and ``horovod.torch`` has not, or as a module."""
_TRAINING = {"DistributedOptimizer", "SyncBatchNorm"}
_FUNCTIONS = {
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
}
_PROCESS_SETS = ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set")
_TORCH = set(hpctrain.__all__) - _OWN
_BUILT = ("ccl_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built")
_OURSITIES = ("env", "is_iterable", "num_rank_is_power_2", "split_list")

MODULES: Mapping[str, Names] = MappingProxyType(
    {
        "horovod": {
            "__version__": "hpctrain.horovod.shim.modules:VERSION",
            "run": "hpctrain.horovod.shim.functions:run",
        },
        "horovod.common": {},
        "horovod.common.elastic": {
            **_names(("HorovodInternalError",)),
            **_names(("HostsUpdatedInterrupt", "ObjectState", "State"), _STATES),
        },
        "horovod.common.exceptions": {
            "HorovodInternalError": "hpctrain:HorovodInternalError",
            "HorovodVersionMismatchError": f"{_OURS}:HorovodVersionMismatchError",
            "HostsUpdatedInterrupt": f"{_STATES}:HostsUpdatedInterrupt",
        },
        "horovod.common.process_sets": _names(_PROCESS_SETS),
        "horovod.common.util": _names((*_BUILT, *_OURSITIES), _OURS),
        "horovod.runner": {"run": "hpctrain.horovod.shim.functions:run"},
        "horovod.torch": _names(_TORCH),
        "horovod.torch.compression": {
            "Compression": "hpctrain:Compression",
            "Compressor": "hpctrain.compress.compressor:Compressor",
            "FP16Compressor": f"{_HALF}:Compression.fp16",
            "NoneCompressor": f"{_HALF}:Compression.none",
        },
        "horovod.torch.elastic": {
            **_names(("ElasticSampler", "TorchState", "run"), _STATES),
            **_names(("init", "shutdown")),
        },
        "horovod.torch.elastic.sampler": {
            **_names(("ElasticSampler",), _STATES),
            **_names(("rank", "size")),
        },
        "horovod.torch.elastic.state": {
            **_names(("ElasticSampler", "ObjectState", "TorchState"), _STATES),
            **_names((*_FUNCTIONS, "rank")),
        },
        "horovod.torch.functions": _names(
            (
                *_FUNCTIONS,
                *("ProcessSet", "global_process_set", "rank", "size"),
                *("allgather", "broadcast_", "broadcast_async_", "synchronize"),
            )
        ),
        "horovod.torch.mpi_ops": {
            **_names((_TORCH - _TRAINING - _FUNCTIONS) | {"is_homogeneous"}),
            "num_rank_is_power_2": f"{_OURS}:num_rank_is_power_2",
        },
        "horovod.torch.optimizer": {
            **_names(("Adasum", "Average", "Compression", "DistributedOptimizer", "Sum")),
            **_names(("ProcessSet", "global_process_set", "rocm_built", "size", "synchronize")),
            **_names(("allreduce_async_", "grouped_allreduce_async_", "sparse_allreduce_async")),
            **_names(("broadcast_object",)),
            "split_list": f"{_OURS}:split_list",
        },
        "horovod.torch.sync_batch_norm": _names(
            ("Sum", "SyncBatchNorm", "allgather_async", "allreduce_async", "size", "synchronize")
        ),
    }
)
"""Every module that there is; what is in none of them is refused with an error that says so."""

FRAMEWORKS = {
    "horovod._keras": "Keras",
    "horovod.keras": "Keras",
    "horovod.mxnet": "MXNet",
    "horovod.ray": "Ray",
    "horovod.spark": "Spark",
    "horovod.tensorflow": "TensorFlow",
}
"""Modules of Horovod for what hpctrain has nothing to do with."""


def refusal(name: str) -> str:
    """Say that there is no such module or name, and the way out.

    Args:
        name: with its module, ``"horovod.torch.nonsense"``.
    """
    module, _, last = name.rpartition(".")
    framework = FRAMEWORKS.get(".".join(name.split(".")[:2]), "")
    if framework:
        return (
            f"hpctrain trains PyTorch models and has nothing for {framework}, so there is no "
            f"{name}; run this script with Horovod itself, or see {GUIDE}"
        )
    return (
        f"hpctrain has no counterpart of {last!r} of Horovod's module {module}; "
        f"{GUIDE} tells what it has, and what to do without"
    )


def fill(module: ModuleType) -> None:
    """Give an empty module of one of ``MODULES`` its names; each is looked up at its first use."""
    name = module.__name__
    names = MODULES[name]
    parts = [each.rpartition(".")[2] for each in MODULES if each.rpartition(".")[0] == name]
    public = sorted({*names, *parts} - {"__version__"})
    vars(module).update(
        {
            MARK: True,
            "__all__": public,
            "__dir__": lambda: sorted({*vars(module), *names, *parts}),
            "__doc__": f"hpctrain under the name of Horovod's {name}.",
            "__getattr__": _lookup(module, names, parts),
            # A package: so that `from ... import` of a missing name asks the finder, whose
            # error says why.
            "__path__": [],
        }
    )


def _lookup(module: ModuleType, names: Names, parts: list[str]) -> Callable[[str], Any]:
    def lookup(name: str) -> Any:
        if name in names:
            value = resolve(names[name])
            setattr(module, name, value)
            return value
        if name in parts:
            return import_module(f"{module.__name__}.{name}")
        raise AttributeError(refusal(f"{module.__name__}.{name}"), name=name, obj=module)

    return lookup


def resolve(place: str) -> Any:
    """Return what lies at ``"module:attribute"``."""
    home, _, path = place.partition(":")
    value: Any = import_module(home)
    for part in path.split("."):
        value = getattr(value, part)
    return value
