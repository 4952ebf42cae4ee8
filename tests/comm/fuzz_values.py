"""Draw the tensors of all ranks for the fuzz test, and compute the expected results with numpy."""

import functools
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from hpctrain.comm.ops import Op

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHTHS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
COMPLEX = {
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
    torch.complex32: torch.float16,
}
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
DTYPES = (*FLOATS, *EIGHTHS, *COMPLEX, *INTEGERS, torch.bool)

FUNCTIONS = {
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}
ARITHMETIC, ORDER = (Op.SUM, Op.PRODUCT), (Op.MIN, Op.MAX)
TILE = 4093  # period of large tensors: cheap to make and to check, and not a round number


def ops_of(dtype):
    if dtype in COMPLEX:
        return ARITHMETIC
    if dtype in INTEGERS or dtype is torch.bool:
        return tuple(FUNCTIONS)
    return ARITHMETIC + ORDER


@dataclass(frozen=True)
class Draw:
    """Draw a tensor for every rank, with the same dtype but different values."""

    seed: tuple[int, ...]
    dtype: torch.dtype
    specials: bool  # whether NaN, infinity and zeros of both signs occur

    def values(self, rank, numel):
        """Return the ``numel`` elements of a rank, flat and contiguous."""
        if numel == 0:
            return torch.empty(0, dtype=self.dtype)
        if numel > TILE:
            tile = self.values(rank, TILE)
            repeated = as_bytes(tile).view(TILE, -1).repeat(-(-numel // TILE), 1)
            return repeated[:numel].reshape(-1).view(self.dtype)
        source = np.random.default_rng((*self.seed, rank))
        if self.dtype is torch.bool:
            return torch.from_numpy(source.integers(0, 2, numel, np.uint8)).bool()
        if self.dtype in INTEGERS:  # the whole range, so that sums wrap around
            raw = source.integers(0, 256, numel * self.dtype.itemsize, np.uint8)
            return torch.from_numpy(raw).view(self.dtype)
        if self.dtype in COMPLEX:
            pairs = torch.from_numpy(source.normal(size=2 * numel))
            return pairs.to(COMPLEX[self.dtype]).view(self.dtype)
        return torch.from_numpy(self._floats(source, numel)).to(self.dtype)

    def _floats(self, source, numel):
        floats = source.normal(size=numel)
        if self.specials:
            where = source.integers(0, numel, 1 + numel // 8)
            # Not all 8-bit floats have an infinity; it may become NaN or the largest number.
            ends = [] if self.dtype in EIGHTHS else [np.inf, -np.inf]
            floats[where] = source.choice([0.0, -0.0, np.nan, *ends], where.size)
        return floats


def as_bytes(tensor):
    flat = tensor.resolve_conj().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def as_numpy(tensor):
    """Return the same values in a dtype that numpy can compute with."""
    tensor = tensor.detach().resolve_conj()
    if tensor.dtype in COMPLEX:
        return tensor.to(torch.complex128).numpy()
    if tensor.dtype in EIGHTHS:
        return tensor.to(torch.float32).double().numpy()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def crc(tensor):
    """Return a checksum of the bits; all NaN count as equal."""
    values = as_numpy(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        values = np.where(np.isnan(values), np.nan, values)
    return zlib.crc32(np.ascontiguousarray(values).tobytes())


def reduced(draw, op, scale, size, numel):
    """Return the expected reduction of the tensors of all ranks, and its tolerance.

    Returns:
        Two flat arrays of ``numel`` elements; the second is None if the result must be exact.
    """
    if numel > TILE:
        pair = reduced(draw, op, scale, size, TILE)
        return tuple(None if array is None else np.resize(array, numel) for array in pair)
    inputs = [as_numpy(draw.values(rank, numel)) for rank in range(size)]
    with np.errstate(all="ignore"):
        result = functools.reduce(FUNCTIONS[op], inputs)
        is_exact = op not in ARITHMETIC and scale is None
        if draw.dtype in INTEGERS or draw.dtype is torch.bool or is_exact:
            return result, None
        factor = 1.0 if scale is None else scale
        magnitude = functools.reduce(FUNCTIONS[op], map(np.abs, inputs)) if op in ARITHMETIC else 0
        magnitude = factor * (np.abs(magnitude) + np.abs(result))
        return result * factor, _bound(draw.dtype, magnitude, size)


def _bound(dtype, magnitude, size):
    """Allow one rounding per rank and for the scale each; any difference after an overflow."""
    kind = torch.finfo(COMPLEX.get(dtype, dtype))
    smallest = 10 * kind.smallest_normal * kind.eps
    bound = 2 * (size + 1) * (kind.eps * magnitude + smallest)
    return np.where(np.isfinite(magnitude) & (magnitude > kind.max), np.inf, bound)


def assert_close(result, expected, bound):
    actual = as_numpy(result).reshape(-1)
    if bound is None:
        np.testing.assert_array_equal(actual, expected)
        return
    with np.errstate(all="ignore"):
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        near = (np.abs(actual - expected) <= bound) | np.isposinf(bound)
    far = ~(same | near)
    if far.any():
        first = int(far.argmax())
        raise AssertionError(
            f"{far.sum()} of {far.size} elements are wrong; number {first} is {actual[first]}, "
            f"expected {expected[first]} within {bound[first]}"
        )


# Layouts


def laid_out(values, shape, layout):
    """Return ``values`` in this shape, with the memory layout ``layout``."""
    values = values.view(shape)
    if layout == "expanded":
        copy = values.unsqueeze(0).expand(2, *shape).clone()
        return copy[1]
    if layout == "transposed":
        empty = torch.zeros(shape[::-1], dtype=values.dtype).permute(
            tuple(range(len(shape)))[::-1]
        )
    elif layout == "strided" and shape:
        empty = torch.zeros((*shape[:-1], 2 * shape[-1] + 1), dtype=values.dtype)[..., 1::2]
    elif layout == "offset":
        empty = torch.zeros(values.numel() + 3, dtype=values.dtype)[3:].view(shape)
    elif layout == "conjugated" and values.is_complex():
        empty = torch.zeros(shape, dtype=values.dtype).conj()
    else:
        return values.clone()
    return empty.copy_(values)


LAYOUTS = ("contiguous", "contiguous", "transposed", "strided", "offset", "expanded", "conjugated")
