"""Modules with the names of Horovod 0.28.1, which contain objects of hpctrain."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import hpctrain
from hpctrain.core.errors import ConfigError

VERSION = "0.28.1+hpctrain"
"""Value of ``horovod.__version__``: the version that defines these names, marked as hpctrain."""

GUIDE = "`hpctrain guide migrate`"

MARK = "__hpctrain_shim__"  # attribute of the modules of the shim

Names = Mapping[str, str]  # names of a module, each with its ``"module:attribute"``


def _names(names: Iterable[str], home: str = "hpctrain") -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_STATES = "hpctrain.elastic"
_HALF = "hpctrain.compress.half"
_OURS = "hpctrain.horovod.shim.functions"

_OWN = {"__version__", "check_replicas", "current", "elastic", "is_homogeneous", "record", "run"}
_OWN |= {"shard_data", "submit", "Job", "Resources", "should_stop", "STOPPED", "watch_noise"}
_OWN |= {"DiLoCo", "HierarchicalLocalSGD", "LocalSGD", "PostLocalSGD", "StagedSGD"}
_OWN |= {"AsyncSGD", "Downpour", "Hogwild", "StaleSynchronous", "stable_rate", "ShardedEmbedding"}
_OWN |= {name for name in hpctrain.__all__ if "all_gather" in name or "reduce_scatter" in name}
_OWN |= {name for name in hpctrain.__all__ if name.endswith(("Error", "Warning"))} - {
    "HorovodInternalError"
}
"""Names of ``hpctrain`` that are not names of ``horovod.torch``, or are modules there."""
_TORCH = _names(set(hpctrain.__all__) - _OWN)
_BEHIND = {**_TORCH, **_names(("is_homogeneous",))}
"""Names of each submodule of ``horovod.torch``; the submodule of Horovod may define fewer."""
_ELASTIC = _names(("ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State"), _STATES)
_ELASTIC |= {**_names(("TorchState", "run"), _STATES), **_names(("HorovodInternalError",))}
_BUILT = ("ccl_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built")
_SETS = ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set")

MODULES: Mapping[str, Names] = MappingProxyType(
    {
        "horovod": {"__version__": f"{__name__}:VERSION", "run": f"{_OURS}:run"},
        "horovod.common": {},
        "horovod.common.elastic": _ELASTIC,
        "horovod.common.exceptions": {
            **_names(("HorovodInternalError",)),
            **_names(("HostsUpdatedInterrupt",), _STATES),
        },
        "horovod.common.process_sets": _names(_SETS),
        "horovod.common.util": {**_names(_BUILT), **_names(("env",), _OURS)},
        "horovod.runner": _names(("run",), _OURS),
        "horovod.torch": _TORCH,
        "horovod.torch.compression": {
            **_names(("Compression",)),
            **_names(("Compressor",), "hpctrain.compress.codec"),
            "FP16Compressor": f"{_HALF}:Compression.fp16",
            "NoneCompressor": f"{_HALF}:Compression.none",
        },
        "horovod.torch.elastic": {**_ELASTIC, **_names(("init", "shutdown"))},
        "horovod.torch.elastic.sampler": {**_BEHIND, **_ELASTIC},
        "horovod.torch.elastic.state": {**_BEHIND, **_ELASTIC},
        "horovod.torch.functions": _BEHIND,
        "horovod.torch.mpi_ops": _BEHIND,
        "horovod.torch.optimizer": _BEHIND,
        "horovod.torch.sync_batch_norm": _BEHIND,
    }
)
"""All modules of the shim; other modules and names of Horovod raise an error."""

FRAMEWORKS = {
    "horovod._keras": "Keras",
    "horovod.keras": "Keras",
    "horovod.mxnet": "MXNet",
    "horovod.ray": "Ray",
    "horovod.spark": "Spark",
    "horovod.tensorflow": "TensorFlow",
}
"""Modules of Horovod for frameworks that hpctrain does not support."""


def refusal(name: str) -> str:
    """Return the error message for an unknown module or name (``"horovod.torch.nonsense"``)."""
    module, _, last = name.rpartition(".")
    framework = FRAMEWORKS.get(".".join(name.split(".")[:2]), "")
    if framework:
        return (
            f"hpctrain supports PyTorch only, not {framework}, so {name} cannot be imported; run "
            f"this script with Horovod itself, or see {GUIDE}"
        )
    return (
        f"hpctrain has no counterpart of {last!r} of Horovod's module {module}; "
        f"{GUIDE} lists the supported names and alternatives"
    )


def fill(module: ModuleType) -> None:
    """Add the names in ``MODULES`` to a module; each object is imported at its first use."""
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
            # Every module is a package, so that `from MODULE import NAME` calls the finder if NAME
            # is missing; the finder raises an error with the reason.
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
    """Return the object at ``"module:attribute"``."""
    home, _, path = place.partition(":")
    value: Any = import_module(home)
    for part in path.split("."):
        value = getattr(value, part)
    return value


TOP = "horovod"


class AliasFinder(Loader):
    """Import hook for ``MODULES``; imports of other Horovod modules raise ``ImportError``."""

    hpctrain_shim: ClassVar[bool] = True  # read by code that requires Horovod itself

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a module in ``MODULES``; None for modules outside of Horovod.

        Raises:
            ImportError: hpctrain has no counterpart of a module of Horovod.
        """
        if fullname in MODULES:
            return ModuleSpec(fullname, self, origin="hpctrain", is_package=True)
        if fullname.startswith(f"{TOP}."):
            # Not a ModuleNotFoundError, because `from MODULE import NAME` would replace its
            # message.
            raise ImportError(refusal(fullname), name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python creates an ordinary module, as cloudpickle expects."""

    def exec_module(self, module: ModuleType) -> None:
        """Add the names in ``MODULES`` to the module."""
        fill(module)


def is_installed() -> bool:
    """Return True if ``import horovod`` imports hpctrain in this process."""
    return any(isinstance(each, AliasFinder) for each in sys.meta_path)


def install() -> None:
    """Make ``import horovod`` import hpctrain, in this process.

    Not collective. A second call is a no-op.

    Raises:
        ConfigError: Horovod itself was imported before.
    """
    if is_installed():
        return
    loaded = sys.modules.get(TOP)
    if loaded is not None and not hasattr(loaded, MARK):
        raise ConfigError(
            "the shim must be installed before Horovod is imported, but Horovod was imported from "
            f"{getattr(loaded, '__file__', None)}; call hpctrain.horovod.shim.install() first"
        )
    sys.meta_path.insert(0, AliasFinder())


def uninstall() -> None:
    """Make ``import horovod`` import Horovod again; remove the shim from ``sys.modules``."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, AliasFinder)]
    for name in [name for name, module in sys.modules.items() if hasattr(module, MARK)]:
        del sys.modules[name]
