"""Names of torch that are private, or that are missing in a supported version of torch.

The other modules import these names from here and do not compare versions of torch. A comment such
as ``# 2.7`` states the first version of torch that has the name, and so needs no fallback.
"""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from inspect import signature
from types import CodeType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as _c10d
from torch.amp import GradScaler
from torch.autograd import Variable, graph
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from hpctrain.core.errors import ConfigError
from hpctrain.core.logs import logger

F = TypeVar("F", bound=Callable[..., Any])

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Major and minor version of the imported torch."""
TESTED = ((2, 6), (2, 15))
"""The oldest and the newest version that the tests ran with."""


@cache
def warn_if_untested() -> None:
    """Log one line, once per process, if the tests did not run with this version of torch."""
    oldest, newest = (".".join(map(str, version)) for version in TESTED)
    if not TESTED[0] <= VERSION <= TESTED[1]:
        logger.warning(
            f"hpctrain was tested with torch {oldest} to {newest}, got {torch.__version__}; "
            f"compare a short run with a tested version before a long one"
        )


def is_wrapper(tensor: Tensor) -> bool:
    """Return True if a tensor, such as a ``DTensor``, stores its elements in other tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def require(feature: str, is_there: object, version: str) -> None:
    """Raise ``ConfigError`` unless the installed torch has ``feature``, added in ``version``."""
    if not is_there:
        raise ConfigError(
            f"torch must be {version} or later for {feature}, got {torch.__version__}; update "
            f"torch, or do without {feature}"
        )


# -- the compiler ------------------------------------------------------------------------------

_frames: Any = torch._C._dynamo.eval_frame


def dynamo_disable(function: F) -> F:
    """Exclude a function, and the functions that it calls, from ``torch.compile``.

    Apply this decorator directly to the function, below other decorators.
    ``torch.compiler.disable`` instead imports the compiler, which takes a second of processor time
    on every rank.
    """
    if hasattr(_frames, "set_code_exec_strategy"):  # 2.7
        skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
        _frames.set_code_exec_strategy(function.__code__, skip)
    else:
        _frames.skip_code(function.__code__)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


DYNAMO = "torch._dynamo"


def set_dynamo(module: Any) -> None:
    """Replace the module ``torch._dynamo`` by ``module``; None removes the module."""
    if module is None:
        del sys.modules[DYNAMO], torch._dynamo
    else:
        sys.modules[DYNAMO] = torch._dynamo = module


Operator: type = torch._ops.OpOverload

# -- autograd ----------------------------------------------------------------------------------

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return the id of the backward pass that runs in this thread, or -1 outside of a pass."""
is_multithreading_enabled: Callable[[], bool] = torch._C._is_multithreading_enabled
increment_version: Callable[[Sequence[Tensor]], None] = torch._C._increment_version
"""Record that tensors were changed in place, by code that autograd does not see.

The public function, which also takes a single tensor, needs twice the time.
"""
BACKWARD: CodeType = graph._engine_run_backward.__code__
"""Code object of the Python frame that calls the C++ code of autograd."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs in this thread."""
    Variable._execution_engine.queue_callback(function)


def identity_of(tensor: Tensor) -> int:
    """Return an identifier of the C++ tensor of ``tensor``.

    Hooks are registered on the C++ tensor. A conversion of a module may give its parameters new
    C++ tensors.
    """
    return tensor._cdata


def accumulation_hooks_of(tensor: Tensor) -> Collection[object]:
    """Return the hooks that autograd calls after it has accumulated the gradient of ``tensor``."""
    return (tensor._post_accumulate_grad_hooks or {}).values()


def rearm_hooks(tensor: Tensor) -> None:
    """Register the hooks of ``tensor`` again, after its C++ tensor was replaced.

    The replacement keeps the hooks as Python attributes but does not register them in C++.
    """
    for hooks in ("_post_accumulate_grad_hooks", "_backward_hooks"):
        setattr(tensor, hooks, getattr(tensor, hooks))


# -- tensors -----------------------------------------------------------------------------------

foreach_add: Callable[..., Any] = torch._foreach_add
foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_addcmul_: Callable[..., Any] = torch._foreach_addcmul_
foreach_clamp_max_: Callable[..., Any] = torch._foreach_clamp_max_
foreach_clamp_min_: Callable[..., Any] = torch._foreach_clamp_min_
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_div: Callable[..., Any] = torch._foreach_div
foreach_lerp_: Callable[..., Any] = torch._foreach_lerp_
foreach_mul_: Callable[..., Any] = torch._foreach_mul_
foreach_norm: Callable[..., Any] = torch._foreach_norm
foreach_sqrt: Callable[..., Any] = torch._foreach_sqrt
foreach_sub_: Callable[..., Any] = torch._foreach_sub_
unscale_: Callable[..., Any] = torch._amp_foreach_non_finite_check_and_unscale_

unscale_grads: Callable[..., dict[torch.device, Tensor]] = GradScaler._unscale_grads_


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def hidden_from_modes(function: Callable[[], object]) -> Callable[[], object]:
    """Wrap ``function`` so that no ``TorchDispatchMode`` of the caller observes its operations."""

    def call() -> object:
        with _disable_current_modes():
            return function()

    return call


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor, which each in-place operation increments."""
    return 0 if tensor.is_inference() else tensor._version


def values_of(tensor: Tensor) -> Tensor:
    """Return the stored values of a dense or sparse tensor; a sparse tensor may be uncoalesced."""
    return tensor._values() if tensor.is_sparse else tensor


def replace_unscale_grads(function: Callable[..., dict[torch.device, Tensor]]) -> None:
    """Replace the function by which ``GradScaler`` unscales the gradients of an optimizer."""
    GradScaler._unscale_grads_ = function  # type: ignore[method-assign]


def leave_scaling_to(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.step()`` unscale gradients and skip steps, instead of ``GradScaler``."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def first_state_of_adagrad(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that the constructor of Adagrad creates for a parameter.

    The result is empty with torch 2.13 or later, because there the first step creates the state.
    """
    names = signature(torch.optim.Adagrad).parameters.keys() & group.keys() - {"params"}
    made = torch.optim.Adagrad([parameter], **{name: group[name] for name in names})
    state: dict[str, Any] = made.state[parameter]
    return state


FLOAT8_SCALE: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)  # 2.7
"""Dtype for the common scale factor of a block of 8-bit numbers; has only powers of two."""
FLOAT8: tuple[torch.dtype, ...] = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    *filter(None, [FLOAT8_SCALE]),
)

can_move_storage = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # 2.13


def move_storage(tensor: Tensor, other: Tensor) -> None:
    """Exchange the memory of two tensors' storages; requires ``can_move_storage``."""
    tensor.untyped_storage()._swap_data_ptr_(other.untyped_storage())  # type: ignore[attr-defined]


def accelerator() -> torch.device | None:
    """Return the device type of the available accelerator, or None without an accelerator."""
    kinds = torch.accelerator
    if not kinds.is_available():  # torch 2.6 has no argument check_available
        return None
    return kinds.current_accelerator()


# -- torch.distributed -------------------------------------------------------------------------

Store: TypeAlias = _c10d.Store
HashStore: TypeAlias = _c10d.HashStore
PrefixStore: TypeAlias = _c10d.PrefixStore
TCPStore: TypeAlias = _c10d.TCPStore
register_work = _c10d._register_work
resolve_group = _c10d._resolve_process_group
functional: Any = torch.ops._c10d_functional
"""The operations of functional collectives."""


def replace_builtin_hooks(changed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method of DistributedDataParallel that registers a built-in C++ hook.

    ``changed`` takes torch's method and returns the method that replaces it.
    """
    of_torch = DistributedDataParallel._register_builtin_comm_hook
    DistributedDataParallel._register_builtin_comm_hook = changed(of_torch)  # type: ignore[method-assign]


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a process group for a device."""
    return group._get_backend(device)


def group_by_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group with the NCCL backend, for functions that require one. Collective."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    kind = dist.ProcessGroup.BackendType.NCCL
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(torch.device("cuda"), kind, nccl)
    return group


def leave_unrecorded(kind: type) -> None:
    """Exclude process groups of class ``kind`` from the flight recorder of torch 2.15.

    The recorder supports only groups that are implemented in C++.
    """
    name = "_maybe_attach_flight_recorder"
    attach = getattr(distributed_c10d, name, None)
    if attach is None:
        return

    def attach_to_others(group: Any, *arguments: Any) -> None:
        if not isinstance(group, kind):
            attach(group, *arguments)

    setattr(distributed_c10d, name, attach_to_others)


def leave_out_first_messages(kind: type) -> None:
    """Make pipelines over groups of class ``kind`` omit the first messages between stages.

    Before version 2.13, torch sends these messages only to connect the ranks by NCCL. Each message
    is sent with 8 bytes but received with 4.
    """
    if VERSION >= (2, 13):
        return
    stage = importlib.import_module("torch.distributed.pipelining.stage")._PipelineStageBase
    of_torch = stage._get_init_p2p_neighbors_ops

    def messages(self: Any) -> list[Any]:
        is_ours = isinstance(self.group or dist.group.WORLD, kind)
        return [] if is_ours else of_torch(self)

    stage._get_init_p2p_neighbors_ops = messages


def forget_earlier_meshes() -> None:
    """Clear the caches of DTensor, which may refer to destroyed process groups.

    A mesh of the same ranks, but with other groups, would use the cached entries.
    """
    planned = sys.modules.get("torch.distributed.tensor._redistribute")
    if planned is None:  # DTensor is not loaded, so its caches are empty; loading takes a second
        return
    debug = importlib.import_module("torch.distributed.tensor.debug")
    if hasattr(debug, "_clear_sharding_prop_cache"):  # 2.10
        debug._clear_sharding_prop_cache()
    else:
        dispatcher = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    for each in vars(planned).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def unflattened(axis: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh that splits ``axis`` into several axes. Collective over ``axis``."""
    if hasattr(axis, "_unflatten"):  # 2.10
        return axis._unflatten(0, sizes, names)
    ranks = axis.mesh.view(sizes)
    here = (ranks == dist.get_rank()).nonzero()[0].tolist()
    lines = [
        ranks[tuple(slice(None) if at == dim else here[at] for at in range(len(here)))]
        for dim in range(len(here))
    ]
    groups = [dist.new_group(line.tolist(), use_local_synchronization=True) for line in lines]
    return DeviceMesh.from_group(groups, axis.device_type, ranks, mesh_dim_names=names)


has_cpu_streams = hasattr(torch.cpu.Stream, "record_event")  # 2.7
"""Whether FSDP2 works with tensors on CPUs."""
can_pipeline = has_cpu_streams
"""Whether pipeline schedules let the caller scale the gradients."""


def without_outputs(run: Callable[..., Any]) -> dict[str, bool]:
    """Return the keyword argument that makes a pipeline schedule discard its outputs.

    The result is empty before torch 2.10.
    """
    return {"return_outputs": False} if "return_outputs" in signature(run).parameters else {}


def average_unused_parameters(model: Any) -> None:
    """Make FSDP2 reduce zeros for parameters that have no gradient on this rank."""
    if hasattr(model, "set_reduce_scatter_unused_params"):  # 2.13
        model.set_reduce_scatter_unused_params(True)
        return
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        group = state._fsdp_param_group if state else None
        for parameter in group.fsdp_params if group else ():
            accumulate = parameter.accumulate_unsharded_grad_if_needed
            filled = partial(_fill_in_zeros, group, parameter, accumulate)
            parameter.accumulate_unsharded_grad_if_needed = filled


def _fill_in_zeros(group: Any, parameter: Any, accumulate: Callable[[], None]) -> None:
    accumulate()
    whole: nn.Parameter | None = getattr(parameter, "_unsharded_param", None)
    if whole is None or not group.reduce_grads or not whole.requires_grad:
        return
    if whole.grad is None and parameter.unsharded_accumulated_grad is None:
        whole.grad = torch.zeros_like(whole)


def gather_asynchronously(unit: Any) -> None:
    """Make FSDP2 gather the parameters of a module on a CPU asynchronously."""
    unit._set_unshard_async_op(async_op=True)


def drop_gathered(unit: Any) -> None:
    """Free the parameters of an FSDP2 module that were gathered in advance but not used."""
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None and group._all_gather_result is not None:
        group.wait_for_unshard()
        unit.reshard()


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join all axes of ``mesh`` into one axis, ``name``. The first call is collective."""
    return mesh._flatten(name)


def as_own_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if ``tensor`` is a view."""
    return tensor.clone() if tensor._is_view() else tensor


def move_to_front(module: nn.Module, handle: Any) -> None:
    """Make the forward pre-hook of ``handle`` run before the other pre-hooks of ``module``."""
    hooks: Any = module._forward_pre_hooks
    hooks.move_to_end(handle.id, last=False)
