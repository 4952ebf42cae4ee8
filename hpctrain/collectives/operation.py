"""Common parts of all operations: checks, handles, compression and derivatives."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hpctrain.comm.ops import Op, combination
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.compress.codec import Compressor
from hpctrain.compress.half import Compression
from hpctrain.core.errors import CommError, ConfigError, HpctrainDeprecationWarning
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.pending_table import NUM_SLOTS
from hpctrain.negotiation.request import Handle, Kind, ReduceOp, Request, Result, Signature
from hpctrain.runtime.process_sets import ProcessSet, global_process_set
from hpctrain.runtime.world import current

_PREFIX = {kind: f"{kind.value}." for kind in Kind}

only: Callable[[Result], Tensor] = itemgetter(0)  # takes the single tensor of a result


class UnsupportedError(ConfigError, NotImplementedError):
    """A function does not support the given arguments."""


def controller_of(process_set: ProcessSet | None) -> Controller:
    """Return the controller of a process set; None means the set of all ranks.

    Raises:
        NotInitializedError: ``hpctrain.init()`` was not called.
        ConfigError: the set is not registered, or this rank is not in it.
    """
    sets = current().sets
    if process_set is global_process_set or process_set is None:
        return sets.global_controller
    return sets.controller(process_set)


def named(kind: Kind, name: str | None) -> str | None:
    """Return ``name`` with a prefix, so that operations of two kinds may have the same name."""
    return None if name is None else f"{_PREFIX[kind]}{name}"


AverageFlag: TypeAlias = bool | None
"""Horovod's deprecated argument ``average``, which ``op`` replaces; None if not given."""


def chosen_op(op: ReduceOp | None, average: AverageFlag, *, stacklevel: int = 3) -> ReduceOp:
    """Return the reduction that ``op``, or Horovod's deprecated ``average``, selects.

    Raises:
        ConfigError: ``op`` is not a reduction, or both arguments are given.
    """
    if average is None:
        if op is None:
            return ReduceOp.AVERAGE
        if op.__class__ is ReduceOp:
            return op
        raise ConfigError(
            f"op must be one of Average, Sum, Adasum, Min, Max and Product, got {op!r}"
        )
    if op is not None:
        raise ConfigError(
            f"op and average must not both be given, got op={op!r} and average={average}; use op"
        )
    warnings.warn(
        "the argument average is deprecated; use op=Average or op=Sum",
        HpctrainDeprecationWarning,
        stacklevel=stacklevel,
    )
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def check_tensor(tensor: Tensor) -> None:
    """Raise ``ConfigError`` unless ``tensor`` is a dense tensor with values."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"operations must get tensors, got {type(tensor).__name__}; send other objects by "
            f"broadcast_object or allgather_object"
        )
    check_values(tensor)
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"operations must get dense tensors, got {str(tensor.layout).removeprefix('torch.')}; "
            f"pass tensor.to_dense(), or use sparse_allreduce_async"
        )


def check_target(tensor: Tensor) -> None:
    """Raise ``ConfigError`` unless an operation can replace ``tensor`` in place."""
    check_tensor(tensor)
    if shares_elements(tensor):
        raise ConfigError(
            f"operations in place must get tensors whose elements do not share memory, got one of "
            f"shape {tuple(tensor.shape)} and strides {tensor.stride()}; call clone() first, or "
            f"use the operation without a trailing underscore"
        )


def shares_elements(tensor: Tensor) -> bool:
    """Return whether elements of a dense tensor share memory, as after ``expand()``."""
    if 0 not in tensor.stride() or not tensor.numel():
        return False
    return any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def check_values(tensor: Tensor) -> None:
    """Raise ``ConfigError`` for a tensor on device ``meta``, which has no values."""
    if tensor.is_meta:
        raise ConfigError(
            f"operations must get tensors that have values, got one on {tensor.device}; move the "
            f"model to a device first, for example by to_empty(device='cpu')"
        )


def check_rows(tensor: Tensor, function: str) -> None:
    """Raise ``ConfigError`` as ``check_tensor`` does, and if ``tensor`` has no dimension."""
    check_tensor(tensor)
    if tensor.dim() == 0:
        raise ConfigError(
            f"the tensor of {function} must have a first dimension, got a tensor without "
            f"dimensions; pass tensor.reshape(1)"
        )


def check_group(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors of a group as a list.

    Raises:
        ConfigError: the group is empty, or not an iterable of tensors.
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise ConfigError(
            f"grouped operations must get a list of tensors, got {type(tensors).__name__}"
        )
    group = list(tensors)
    if not group:
        raise ConfigError("grouped operations must get one or more tensors, got an empty list")
    return group


class Scaled(NamedTuple):
    """A reduction with the factors of this rank's tensors and of the result."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


@dynamo_disable
def reduction(
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    scaled: Scaled,
    *,
    in_place: bool = False,
) -> Request:
    """Check tensors, and return the request to reduce them.

    Raises:
        ConfigError: a tensor is not valid, or its dtype does not support the reduction.
    """
    check = check_target if in_place else check_tensor
    scaled = Scaled(scaled.op, float(scaled.prescale), float(scaled.postscale))
    if len(tensors) == 1:  # fast path: a step may have thousands of such calls
        (tensor,) = tensors
        check(tensor)
        full_name, signature = _of_one(kind, name, tensor.dtype, tensor.shape, scaled)
        return Request.signed(signature, full_name, (tensor,), in_place=in_place)
    for tensor in tensors:
        check(tensor)
        _check_values(tensor.dtype, scaled)
    full_name = named(kind, name)
    return Request(kind, full_name, tensors, in_place=in_place, **scaled._asdict())


@lru_cache(maxsize=NUM_SLOTS)
def _of_one(
    kind: Kind, name: str | None, dtype: torch.dtype, shape: torch.Size, scaled: Scaled
) -> tuple[str | None, Signature]:
    """Return the full name and the signature of a reduction of one tensor on the CPU."""
    _check_values(dtype, scaled)
    return named(kind, name), Signature(kind, (dtype,), (shape,), *scaled, None, ("cpu",))


def compressed(
    compression: Compressor | type[Compressor] | None,
    tensors: Sequence[Tensor],
    reduce: Callable[[Sequence[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Compress tensors, call ``reduce``, and return the decompressed results."""
    if compression is None or compression is Compression.none:
        return reduce(tensors)
    for tensor in tensors:
        check_tensor(tensor)
    packed = [compression.compress(each) for each in tensors]  # type: ignore[call-arg, arg-type]
    totals = reduce([small for small, _ in packed])
    return [
        compression.decompress(total, context)  # type: ignore[call-arg]
        for total, (_, context) in zip(totals, packed, strict=True)
    ]


class CarriedOut(torch.autograd.Function):
    """Autograd function that executes a request; subclasses define the derivative.

    ``backward`` of a subclass uses ``ctx.signature``, the signature of the request, and
    ``ctx.rows``, the number of rows of each tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, request: Request, process_set: ProcessSet | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Execute ``request``, whose ``tensors`` are passed separately for autograd."""
        ctx.signature, ctx.process_set = request.signature, process_set
        ctx.rows = [len(tensor) if tensor.dim() else 1 for tensor in tensors]
        return tuple(controller_of(process_set).run(request))


def carried_out(
    function: type[CarriedOut],
    request: Request,
    tensors: Sequence[Tensor],
    process_set: ProcessSet | None,
) -> list[Tensor]:
    """Execute a request; the result is differentiable if a tensor requires a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(function.apply(request, process_set, *tensors))  # type: ignore[no-untyped-call]
    return list(controller_of(process_set).run(request))


def poll(handle: Handle) -> bool:
    """Return whether ``synchronize(handle)`` would not block. Not collective.

    Raises:
        ConfigError: ``handle`` is not a handle.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result; further calls return the same result.

    Args:
        handle: result of a function with ``_async`` in its name.

    Returns:
        A tensor; a list of tensors for a ``grouped`` operation; the tensor and the received splits
            for ``alltoall_async``. Operations in place return their arguments.

    Raises:
        HorovodInternalError: the operation failed, on every rank of the process set; for example,
            the ranks used one name for operations of different kinds.
        RankLostError: another rank died or left.
        ConfigError: ``handle`` is not a handle.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(
            f"handle must be the result of a function ending in _async, got "
            f"{type(handle).__name__}"
        )
    return handle


@lru_cache(maxsize=256)
def _check_values(dtype: torch.dtype, scaled: Scaled) -> None:
    """Raise ``ConfigError`` if a dtype does not support the reduction."""
    name, op = name_of(dtype), scaled.op
    is_scaled = scaled.prescale != 1.0 or scaled.postscale != 1.0
    if dtype is torch.bool and (is_scaled or op is ReduceOp.AVERAGE):
        raise ConfigError(
            f"tensors of {name} must not be averaged or multiplied by factors; use op=Max for "
            f"'any', op=Min for 'all', or convert the tensor"
        )
    if op is ReduceOp.ADASUM:
        if dtype.is_floating_point and dtype.itemsize > 1:
            return
        raise ConfigError(
            f"tensors of Adasum must be floating point of 16 bits or more, got {name}; convert "
            f"the tensor"
        )
    kinds = {ReduceOp.MIN: Op.MIN, ReduceOp.MAX: Op.MAX, ReduceOp.PRODUCT: Op.PRODUCT}
    try:
        combination(dtype, kinds.get(op, Op.SUM))
    except CommError as error:
        raise ConfigError(str(error)) from None
