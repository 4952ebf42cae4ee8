"""Request of a benchmark, checked before any rank meets another."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hpctrain.comm.ops import Op, combination
from hpctrain.core.errors import CommError, ConfigError
from hpctrain.doctor.benchmarks.operations import OPERATIONS, Setup

REDUCING = ("allreduce", "reduce_scatter")
"""Operations that combine values."""

FACTOR = 4
"""From one size to the next."""

UNCHECKABLE = (torch.float8_e8m0fnu,)
"""Holds powers of two alone, so that sums of it are never exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRequest:
    """One benchmark: an operation over a range of sizes."""

    operation: str
    """One of ``OPERATIONS``."""
    min_bytes: int = 8
    """First size."""
    max_bytes: int = 64 << 20
    """Last size."""
    dtype: str = "float32"
    """A dtype of torch."""
    op: str = "sum"
    """How values are combined: the name of an ``Op``, in small letters."""
    in_bucket: bool = False
    """All-reduce buckets in node memory."""
    peers: bool = False
    """All-reduce with MPI_Allreduce too, on the same memory."""
    iterations: int | None = None
    """Timed calls of each size; None for as many as fit into half a second, 5 to 1000."""

    def __post_init__(self) -> None:
        """Check everything.

        Raises:
            ConfigError: an option is not valid, or has no meaning for this operation.
        """
        if self.operation not in OPERATIONS:
            raise ConfigError(
                f"an operation is one of {', '.join(OPERATIONS)}, got {self.operation!r}"
            )
        if not 1 <= self.min_bytes <= self.max_bytes:
            raise ConfigError(
                f"sizes go from 1 byte or more upwards, got --min-bytes {self.min_bytes} and "
                f"--max-bytes {self.max_bytes}"
            )
        for option, given in (("--bucket", self.in_bucket), ("--peers", self.peers)):
            if given and self.operation != "allreduce":
                raise ConfigError(f"{option} is for allreduce, got {self.operation}; leave it out")
        self._check_op()

    def setups(self) -> list[Setup]:
        """Return the messages, smallest first; a barrier has one, of nothing."""
        sizes = [0] if self.operation == "barrier" else self._sizes()
        return [self.setup(num_bytes) for num_bytes in sizes]

    def setup(self, num_bytes: int) -> Setup:
        """Return the message of a size."""
        dtype, op = self.torch_dtype, self.torch_op
        return Setup(num_bytes=num_bytes, dtype=dtype, op=op, in_bucket=self.in_bucket)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype.

        Raises:
            ConfigError: torch has none of this name, or its values cannot be checked.
        """
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype) or found in UNCHECKABLE:
            raise ConfigError(
                f"--dtype is one of torch's number types, such as float32, bfloat16, int64, "
                f"complex64 or bool, got {self.dtype!r}"
            )
        return found

    @property
    def torch_op(self) -> Op:
        """The operation on values.

        Raises:
            ConfigError: there is none of this name.
        """
        try:
            return Op[self.op.upper()]
        except KeyError:
            names = ", ".join(op.name.lower() for op in Op)
            raise ConfigError(f"--op is one of {names}, got {self.op!r}") from None

    @property
    def op_shown(self) -> str:
        """The operation on values, empty where none are combined."""
        return self.op if self.operation in REDUCING else ""

    def _sizes(self) -> Iterator[int]:
        num_bytes = self.min_bytes
        while num_bytes < self.max_bytes:
            yield num_bytes
            num_bytes *= FACTOR
        yield self.max_bytes

    def _check_op(self) -> None:
        if self.operation not in REDUCING and self.torch_op is not Op.SUM:
            raise ConfigError(
                f"--op is for {' and '.join(REDUCING)}, got {self.op} for {self.operation}; "
                f"leave it out"
            )
        try:
            combination(self.torch_dtype, self.torch_op)
        except CommError as error:
            raise ConfigError(f"--dtype {self.dtype} and --op {self.op}: {error}") from None
