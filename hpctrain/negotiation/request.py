"""Requests of one rank, with their handles, and the signatures that the ranks compare."""

import enum
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.core.python_compat import Self


class ReduceOp(enum.Enum):
    """Reduction operation over the ranks, with Horovod's names."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    __hash__ = object.__hash__  # Enum's hash is a Python function, which is slow


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
"""``op`` of a reduction over the ranks: the mean, the sum, or the adaptive sum of gradients."""
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT
"""``op`` of an elementwise reduction over the ranks."""


class Kind(enum.Enum):
    """Kind of a named operation."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"

    __hash__ = object.__hash__


_FREE_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)
"""Kinds whose first dimension may differ between ranks."""


class Signature(NamedTuple):
    """Properties of an operation that must be equal on all ranks; picklable."""

    kind: Kind
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors; see ``is_free`` for kinds that omit the first dimension."""
    op: ReduceOp | None
    prescale: float
    postscale: float
    root: int | None
    devices: tuple[str, ...]

    def describe(self) -> str:
        """Return a description for messages, such as ``allreduce (sum) of float32 [3, 4]``."""
        what = self.kind.value if self.op is None else f"{self.kind.value} ({self.op.value})"
        some = [
            f"{str(dtype).removeprefix('torch.')} {'[..., ' if self.is_free else '['}"
            f"{', '.join(map(str, shape))}]"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        text = f"{what} of {', '.join(some)}" if some else what
        if self.prescale != 1.0 or self.postscale != 1.0:
            text += f", prescaled by {self.prescale:g}, postscaled by {self.postscale:g}"
        if self.root is not None:
            text += f" from rank {self.root}"
        return text + "".join(f" on {device}" for device in set(self.devices) - {"cpu"})

    @property
    def is_free(self) -> bool:
        """Whether the shapes omit the first dimension, which may differ between ranks."""
        return self.kind in _FREE_ROWS


class Request:
    """An operation that one rank submits, on one tensor or on a group of tensors.

    The tensors of a group complete together.

    Args:
        kind: kind of the operation.
        name: name, the same on all ranks; None to name the operation by kind and number.
        tensors: inputs. Dense tensors must not be used until the operation is complete.
        in_place: True if the operation stores its results in ``tensors``.
        op: reduction over the ranks, if the operation reduces.
        prescale: factor before the reduction.
        postscale: factor after the reduction.
        root: source of a broadcast, as a rank of the process set.
        splits: for an all-to-all, the number of rows to send to each rank.
    """

    __slots__ = ("in_place", "kind", "name", "signature", "splits", "tensors")

    def __init__(  # noqa: PLR0913 - arguments of all kinds
        self,
        kind: Kind,
        name: str | None,
        tensors: Sequence[Tensor],
        *,
        in_place: bool = False,
        op: ReduceOp | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int | None = None,
        splits: Sequence[int] | None = None,
    ) -> None:
        self.kind, self.name, self.in_place, self.splits = kind, name, in_place, splits
        self.tensors = tensors = tuple(tensors)
        start = 1 if kind in _FREE_ROWS else 0
        dtypes = tuple([tensor.dtype for tensor in tensors])
        shapes = tuple([tensor.shape[start:] for tensor in tensors])
        devices = tuple([tensor.device.type for tensor in tensors])
        self.signature = Signature(kind, dtypes, shapes, op, prescale, postscale, root, devices)

    @classmethod
    def signed(
        cls,
        signature: Signature,
        name: str | None,
        tensors: tuple[Tensor, ...],
        *,
        in_place: bool,
        splits: Sequence[int] | None = None,
    ) -> Self:
        """Create a request with an existing signature."""
        self = cls.__new__(cls)
        self.kind, self.name, self.signature = signature.kind, name, signature
        self.tensors, self.in_place, self.splits = tensors, in_place, splits
        return self


Result = Sequence[Any]
"""One tensor for each tensor of the request; for an all-to-all, a tensor and the received splits;
empty for a barrier."""


Take = Callable[[Result], Any]  # converts a result to the return value of ``wait``


def through_host(request: Request, take: Take | None) -> tuple[Request, Take]:
    """Return a request on host copies of the tensors, and a ``take`` that copies results back.

    The copies wait for kernels in flight on the devices. The first call of ``take`` copies each
    result to the device of its tensor.
    """
    tensors, found = request.tensors, list[Any]()
    signature = request.signature._replace(devices=("cpu",) * len(tensors))
    on_host = tuple([tensor.detach().cpu() for tensor in tensors])
    copy = Request.signed(
        signature, request.name, on_host, in_place=request.in_place, splits=request.splits
    )

    def bring_back(result: Result) -> Any:
        if not found and request.in_place:
            for tensor, made in zip(tensors, result, strict=True):
                tensor.detach().copy_(made)
            found.extend(tensors)
        elif not found:
            moved = [m.to(t.device) for t, m in zip(tensors, result, strict=False)]
            found.extend([*moved, *result[len(moved) :]])
        return list(found) if take is None else take(found)

    return copy, bring_back


class Driver(Protocol):
    """Interface by which a handle makes progress; implemented by the ``EngineDriver``."""

    def look(self) -> None:
        """Execute operations without waiting."""

    def finish(self, handle: "Handle") -> None:
        """Wait until an operation is complete."""


class Handle:
    """Handle of one operation of this rank.

    Args:
        driver: executes operations while a caller waits; None if the creator of the handle
            completes the operation.
        request: the operation.
        name: name of the operation; by default the name of the request.
        take: function that converts the result to the return value of ``wait``.
    """

    __slots__ = ("_driver", "_error", "_request", "_result", "_take", "is_done", "name", "since")

    repeated: "Repeated | None" = None  # signature of a repeated operation

    def __init__(
        self,
        driver: Driver | None,
        request: Request,
        name: str | None = None,
        take: Take | None = None,
    ) -> None:
        self._request = request
        self.name = (request.name or "") if name is None else name
        self.since = time.monotonic()
        self.is_done = False
        self._driver = driver
        self._take = take
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def request(self) -> Request:
        """Request of the operation."""
        return self._request

    @property
    def signature(self) -> Signature:
        """Signature of the request, which the ranks compare."""
        return self._request.signature

    @property
    def tensor(self) -> Tensor:
        """The tensor of a request with exactly one tensor."""
        return self._request.tensors[0]

    @property
    def is_in_place(self) -> bool:
        """Whether the result replaces the input."""
        return self._request.in_place

    def done(self) -> bool:
        """Return True if the operation is complete or has failed. Not collective."""
        if not self.is_done and self._driver is not None:
            self._driver.look()
        return self.is_done

    def wait(self) -> Any:
        """Wait until the operation is complete; return its result. May be called repeatedly.

        The thread of the caller drives the engine.

        Raises:
            HorovodInternalError: on every rank, if the ranks disagree about this operation.
            RankLostError: another rank died.
        """
        if not self.is_done and self._driver is not None:
            self._driver.finish(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return list(self._result) if self._take is None else self._take(self._result)

    def __call__(self) -> Any:
        """Return the result of ``wait``; in Horovod, handles of sparse tensors are functions."""
        return self.wait()

    def succeed(self, result: Result) -> None:
        """Store the result. The controller calls this method once."""
        self._result = result
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Store the error. The controller calls this method once."""
        self._error = error
        self.is_done = True


_STRIDED = torch.strided


class Repeated:
    """A named in-place reduction of one dense CPU tensor, whose arguments were checked before.

    Args:
        name: full name.
        signature: signature with one tensor.
    """

    __slots__ = ("_dtype", "_op", "_postscale", "_prescale", "_shape", "name", "signature")

    def __init__(self, name: str, signature: Signature) -> None:
        self.name, self.signature = name, signature
        (self._dtype,), (self._shape,) = signature.dtypes, signature.shapes
        self._op, self._prescale = signature.op, signature.prescale
        self._postscale = signature.postscale

    def fits(self, tensor: Tensor, op: ReduceOp, prescale: float, postscale: float) -> bool:
        """Return True if a reduction with these arguments has the stored signature."""
        return (
            isinstance(tensor, Tensor)  # type: ignore[redundant-expr]
            and tensor.dtype is self._dtype
            and op is self._op
            and tensor.shape == self._shape
            and prescale == self._prescale
            and postscale == self._postscale
            and tensor.is_cpu
            and tensor.layout is _STRIDED
        )


class TensorHandle(Handle):
    """Handle of a repeated operation, with little state, since thousands of handles may exist."""

    __slots__ = ("_made", "repeated", "tensor")

    repeated: Repeated
    tensor: Tensor
    is_in_place = True

    def __init__(self, driver: Driver, repeated: Repeated, tensor: Tensor) -> None:
        self.name = repeated.name
        self.since = time.monotonic()
        self.is_done = False
        self._driver = driver
        self._error = None
        self._made: Request | None = None
        self.repeated = repeated
        self.tensor = tensor

    @property
    def signature(self) -> Signature:
        """Signature of the operation, which the ranks compare."""
        return self.repeated.signature

    @property
    def request(self) -> Request:
        """Request of the operation."""
        if self._made is None:
            what = self.repeated.signature, self.name, (self.tensor,)
            self._made = Request.signed(*what, in_place=True)
        return self._made

    def wait(self) -> Tensor:
        """Wait for the operation and return the tensor; see ``Handle``."""
        if not self.is_done and self._driver is not None:
            self._driver.finish(self)
        if self._error is not None:
            raise self._error
        return self.tensor

    @override
    def succeed(self, result: Result) -> None:
        """Mark the operation as complete. The controller calls this method once."""
        self.is_done = True
