"""Request of one rank, the part of it that all ranks must have in common, and its handle."""

import enum
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.core.python_compat import Self


class ReduceOp(enum.Enum):
    """How the values of all ranks become one; Horovod's names."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    __hash__ = object.__hash__  # Enum's own is a function in Python, in the way of every call


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
"""``op`` of a reduction over the ranks: the mean, the sum, or the adaptive sum of gradients."""
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT
"""``op`` of a reduction over the ranks, element by element."""


class Kind(enum.Enum):
    """What a named operation does."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"

    __hash__ = object.__hash__


_FREE_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)
"""Here the first dimension may differ from rank to rank."""


class Signature(NamedTuple):
    """What must be equal on all ranks of an operation of one name; picklable and small."""

    kind: Kind
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors; without the first dimension where that may differ."""
    op: ReduceOp | None
    prescale: float
    postscale: float
    root: int | None
    devices: tuple[str, ...]

    def describe(self) -> str:
        """Return it in words, for messages: ``allreduce (sum) of float32 [3, 4]``."""
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
        """Whether the first dimension is not in the shapes."""
        return self.kind in _FREE_ROWS


class Request:
    """One operation of one rank; several tensors are a group, which travels together."""

    __slots__ = ("in_place", "kind", "name", "signature", "splits", "tensors")

    def __init__(  # noqa: PLR0913 - what all kinds take together
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
        """Take what the caller gave; arguments were checked before.

        A ``name`` of None means the next number of a kind. Dense tensors belong to the operation
        until it is done, which replaces them if it is ``in_place``. The ``root`` is numbered in
        the process set; ``splits`` are the rows of an all-to-all for each rank.
        """
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
        """Return a request whose signature is known already."""
        self = cls.__new__(cls)
        self.kind, self.name, self.signature = signature.kind, name, signature
        self.tensors, self.in_place, self.splits = tensors, in_place, splits
        return self


Result = Sequence[Any]
"""A tensor for each one of the request; of an all-to-all a tensor and the received splits. Nothing
for a barrier."""


Take = Callable[[Result], Any]  # makes what the user gets of the result of a request


def through_host(request: Request, take: Take | None) -> tuple[Request, Take]:
    """Return what is to be done instead where tensors are on devices: the same on the host.

    What the program has queued for them is waited for. The result goes to where each tensor is,
    when it is taken for the first time.
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
    """Carries operations out while a caller waits for them: the ``Controller``."""

    def look(self) -> None:
        """Do what can be done without waiting."""

    def finish(self, handle: "Handle") -> None:
        """Return when an operation is done."""


class Handle:
    """One operation of this rank: ask ``done()``, or ``wait()`` for its result."""

    __slots__ = ("_driver", "_error", "_request", "_result", "_take", "is_done", "name", "since")

    repeated: "Repeated | None" = None  # what it is one of

    def __init__(
        self,
        driver: Driver | None,
        request: Request,
        name: str | None = None,
        take: Take | None = None,
    ) -> None:
        """Begin; without a ``driver``, which drives while somebody waits, nobody will."""
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
        """What is to be done."""
        return self._request

    @property
    def signature(self) -> Signature:
        """What the ranks compare of the request."""
        return self._request.signature

    @property
    def tensor(self) -> Tensor:
        """The tensor of the request, of one that has a single one."""
        return self._request.tensors[0]

    @property
    def is_in_place(self) -> bool:
        """Whether the result takes the place of what was given."""
        return self._request.in_place

    def done(self) -> bool:
        """Say whether ``wait()`` would return, or raise, at once."""
        if not self.is_done and self._driver is not None:
            self._driver.look()
        return self.is_done

    def wait(self) -> Any:
        """Return the result, or raise what went wrong; the caller's thread drives meanwhile.

        It may be called again. ``HorovodInternalError``, on every rank, if the ranks disagree
        about this operation; ``RankLostError`` if another rank died.
        """
        if not self.is_done and self._driver is not None:
            self._driver.finish(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return list(self._result) if self._take is None else self._take(self._result)

    def __call__(self) -> Any:
        """Do what ``wait`` does, as Horovod's handles of sparse tensors."""
        return self.wait()

    def succeed(self, result: Result) -> None:
        """Give the result; called once, by the controller."""
        self._result = result
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Give the error; called once, by the controller."""
        self._error = error
        self.is_done = True


class Repeated:
    """A named reduction in place of one dense tensor on the CPU: what was checked once."""

    __slots__ = ("_dtype", "_op", "_postscale", "_prescale", "_shape", "name", "signature")

    def __init__(self, name: str, signature: Signature) -> None:
        """Take the whole name, and the signature of one tensor."""
        self.name, self.signature = name, signature
        (self._dtype,), (self._shape,) = signature.dtypes, signature.shapes
        self._op, self._prescale = signature.op, signature.prescale
        self._postscale = signature.postscale

    def fits(self, tensor: Tensor, op: ReduceOp, prescale: float, postscale: float) -> bool:
        """Say whether this is what is asked for with ``tensor``."""
        return (
            isinstance(tensor, Tensor)  # type: ignore[redundant-expr]
            and tensor.dtype is self._dtype
            and op is self._op
            and tensor.shape == self._shape
            and prescale == self._prescale
            and postscale == self._postscale
            and tensor.is_cpu
            and tensor.layout is torch.strided
        )


class TensorHandle(Handle):
    """The handle of something repeated: there may be thousands, so it holds what it must."""

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
        """What the ranks compare."""
        return self.repeated.signature

    @property
    def request(self) -> Request:
        """What is to be done."""
        if self._made is None:
            what = self.repeated.signature, self.name, (self.tensor,)
            self._made = Request.signed(*what, in_place=True)
        return self._made

    def wait(self) -> Tensor:
        """Return the tensor, or raise what went wrong; see ``Handle``."""
        if not self.is_done and self._driver is not None:
            self._driver.finish(self)
        if self._error is not None:
            raise self._error
        return self.tensor

    @override
    def succeed(self, result: Result) -> None:
        """Say that it is done; called once, by the controller."""
        self.is_done = True
