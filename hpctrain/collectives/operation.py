"""Common parts of all operations: checked arguments, handles, compression, derivatives."""

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
from hpctrain.core.errors import CommError, ConfigError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.negotiation.controller import Controller
from hpctrain.negotiation.pending_table import NUM_SLOTS
from hpctrain.negotiation.request import Handle, Kind, ReduceOp, Request, Result, Signature
from hpctrain.runtime.process_sets import ProcessSet, global_process_set
from hpctrain.runtime.world import current

_PREFIX = {kind: f"{kind.value}." for kind in Kind}

only: Callable[[Result], Tensor] = itemgetter(0)  # takes the single tensor of a result


class UnsupportedError(ConfigError, NotImplementedError):
    """A function cannot do what its arguments ask for."""


def controller_of(process_set: ProcessSet | None) -> Controller:
    """Return what carries out the operations of a process set; None is the set of all ranks.

    ``NotInitializedError`` before ``init``; ``ConfigError`` if the set is not registered, or this
    rank is not in it.
    """
    sets = current().sets
    if process_set is global_process_set or process_set is None:
        return sets.global_controller
    return sets.controller(process_set)


def named(kind: Kind, name: str | None) -> str | None:
    """Return the name with its kind, as Horovod has it: so that each kind has names of its own."""
    return None if name is None else f"{_PREFIX[kind]}{name}"


AverageFlag: TypeAlias = bool | None
"""Horovod's deprecated argument ``average``, which ``op`` replaces; None if not given."""


def chosen_op(op: ReduceOp | None, average: AverageFlag, *, stacklevel: int = 3) -> ReduceOp:
    """Return the operation. ``ConfigError`` for another value, or if both arguments are given."""
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
            f"op and average exclude each other, got op={op!r} and average={average}; use op"
        )
    warnings.warn(
        "the argument average is deprecated; use op=Average or op=Sum",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def check_tensor(tensor: Tensor) -> None:
    """Refuse, by ``ConfigError``, anything but a dense tensor that has values."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"operations take tensors, got {type(tensor).__name__}; send other objects by "
            f"broadcast_object or allgather_object"
        )
    check_values(tensor)
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"operations take dense tensors, got {str(tensor.layout).removeprefix('torch.')}; "
            f"give tensor.to_dense(), or use sparse_allreduce_async"
        )


def check_values(tensor: Tensor) -> None:
    """Refuse, by ``ConfigError``, a tensor that has a shape alone."""
    if tensor.is_meta:
        raise ConfigError(
            f"operations take tensors that have values, got one on {tensor.device}; let the model "
            f"be there first, by to_empty(device='cpu') for instance"
        )


def check_rows(tensor: Tensor, function: str) -> None:
    """Refuse what ``check_tensor`` does, and a tensor without a first dimension."""
    check_tensor(tensor)
    if tensor.dim() == 0:
        raise ConfigError(
            f"{function} cuts along the first dimension, got a tensor without dimensions; give "
            f"tensor.reshape(1)"
        )


def check_group(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors of a group as a list; ``ConfigError`` if it is empty, or no group."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise ConfigError(
            f"grouped operations take a list of tensors, got {type(tensors).__name__}"
        )
    group = list(tensors)
    if not group:
        raise ConfigError("grouped operations take one or more tensors, got an empty list")
    return group


class Scaled(NamedTuple):
    """An operation, and the factors of this rank's tensors and of the result."""

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
    """Return the request for a reduction of some tensors.

    Raises ``ConfigError``: ``check_tensor`` raises, or the dtype has no such reduction.
    """
    scaled = Scaled(scaled.op, float(scaled.prescale), float(scaled.postscale))
    if len(tensors) == 1:  # the common case, which a program may repeat thousands of times
        (tensor,) = tensors
        check_tensor(tensor)
        full_name, signature = _of_one(kind, name, tensor.dtype, tensor.shape, scaled)
        return Request.signed(signature, full_name, (tensor,), in_place=in_place)
    for tensor in tensors:
        check_tensor(tensor)
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
    """Return what ``reduce`` makes of tensors, compressed on the way."""
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
    """Carries a request out; a kind of operation adds its derivative.

    That knows the request by ``ctx.signature``, and the rows of this rank's tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, request: Request, process_set: ProcessSet | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the results of ``request``, whose tensors are given once more for autograd."""
        ctx.signature, ctx.process_set = request.signature, process_set
        ctx.rows = [len(tensor) if tensor.dim() else 1 for tensor in tensors]
        return tuple(controller_of(process_set).run(request))


def carried_out(
    function: type[CarriedOut],
    request: Request,
    tensors: Sequence[Tensor],
    process_set: ProcessSet | None,
) -> list[Tensor]:
    """Return the result of a request, which can be differentiated where that may be wanted."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(function.apply(request, process_set, *tensors))  # type: ignore[no-untyped-call]
    return list(controller_of(process_set).run(request))


def poll(handle: Handle) -> bool:
    """Say whether ``synchronize(handle)`` would return, or raise, at once. Not collective.

    Raises:
        ConfigError: it is no handle.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result. It may be called again, for the same result.

    Args:
        handle: what a function whose name has ``_async`` in it has returned.

    Returns:
        A tensor; a list of them for a ``grouped`` operation; of ``alltoall_async`` the tensor and
        the received splits. An operation in place returns the tensors that it was given.

    Raises:
        HorovodInternalError: the operation failed, on every rank of the process set: say, the
            ranks gave the same name to operations that do not fit together.
        RankLostError: another rank died or left.
        ConfigError: it is no handle.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(
            f"a handle is what a function ending in _async returns, got {type(handle).__name__}"
        )
    return handle


@lru_cache(maxsize=256)
def _check_values(dtype: torch.dtype, scaled: Scaled) -> None:
    """Raise ``ConfigError`` if a dtype has no such reduction."""
    name, op = name_of(dtype), scaled.op
    is_scaled = scaled.prescale != 1.0 or scaled.postscale != 1.0
    if dtype is torch.bool and (is_scaled or op is ReduceOp.AVERAGE):
        raise ConfigError(
            f"there are no averages and factors of {name}; use op=Max for 'any', op=Min for "
            f"'all', or convert the tensor"
        )
    if op is ReduceOp.ADASUM:
        if dtype.is_floating_point and dtype.itemsize > 1:
            return
        raise ConfigError(
            f"Adasum takes floating point of 16 bits and more, got {name}; convert the tensor"
        )
    kinds = {ReduceOp.MIN: Op.MIN, ReduceOp.MAX: Op.MAX, ReduceOp.PRODUCT: Op.PRODUCT}
    try:
        combination(dtype, kinds.get(op, Op.SUM))
    except CommError as error:
        raise ConfigError(str(error)) from None
