"""Checksums of a small sample of the weights, fast enough to be computed in every step."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.comm.device import device_of
from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.checksum import crc32
from hpctrain.gradients.sparse_gradients import writes_of

T = TypeVar("T")

_NUM_PARAMETERS = 64  # parameters sampled per step, in less than 100 microseconds
_NUM_BYTES = 256  # bytes sampled of each parameter; the next step samples the next bytes


class WeightSample:
    """Computes checksums of some bytes of the parameters; the step number selects the bytes.

    The object also detects which parameters were written after the last step.

    Args:
        parameters: names and parameters. Parameters with gaps in memory are not sampled.
    """

    def __init__(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        self._all = [(name, p) for name, p in parameters if p.layout is torch.strided]
        self._left: list[tuple[int, int]] = []
        self._parameters = [
            (name, p, p.numel() * p.itemsize)
            for name, p in parameters
            if not p.is_meta and p.numel() and _is_dense(p)
        ]
        self._is_on_host = all(p.is_cpu for _, p, _ in self._parameters)
        self._copied: tuple[int, Tensor, torch.Event] | None = None
        """Step, sample of the step in host memory, and event at the end of the copy."""

    def checksum(self, step: int) -> int:
        """Return the checksum of the sample for this step."""
        if self._is_on_host:
            return sample_of([p for _, p, _ in self._due(step)], step)
        copied = self._copied
        if copied is None or copied[0] != step:
            copied = self._copy(step)
        _, sample, there = copied
        if not there.query():  # usually the copy ends before the forward pass
            there.synchronize()
        return crc32(host_bytes(sample))

    def by_name(self, step: int) -> dict[str, str]:
        """Return the checksum of each parameter in the sample for this step, as text."""
        notes = {True: "", False: " (not finite)"}
        return {
            name: f"{sample_of([p.cpu()], step):08x}{notes[bool(p.isfinite().all())]}"
            for name, p, _ in self._due(step)
        }

    def mark(self, next_step: int | None) -> None:
        """Record the versions of the parameters after a step.

        On an accelerator, the sample of the next step is copied to the host asynchronously.
        """
        self._left = [writes_of(p) for _, p in self._all]
        self._copied = None
        if next_step is not None and not self._is_on_host:
            self._copied = self._copy(next_step)

    def _copy(self, step: int) -> tuple[int, Tensor, torch.Event]:
        parts = [_bytes_in(p)[_part(n, step)] for _, p, n in self._due(step)]
        device = next(part.device for part in parts if not part.is_cpu)
        where = device_of(device)
        assert where is not None
        sample, there = torch.cat([part.to(device) for part in parts]), where.new_event()
        host = where.pinned(sample).copy_(sample, non_blocking=True)
        there.record(where.current_stream())
        return step, host, there

    def unmark(self) -> None:
        """Discard the recorded versions, so that ``as_left`` returns no parameters."""
        self._left = []

    def as_left(self) -> dict[str, Parameter]:
        """Return the parameters, by name, that were not written after the last ``mark``.

        Writes through ``.data`` or numpy are not detected, because torch does not count them.
        """
        pairs = zip(self._all, self._left, strict=False)
        return {name: p for (name, p), left in pairs if writes_of(p) == left}

    def _due(self, step: int) -> Sequence[tuple[str, Parameter, int]]:
        return due(self._parameters, step)


def due(items: Sequence[T], step: int) -> Sequence[T]:
    """Return the items to sample in this step; consecutive steps cycle through all items."""
    count = len(items)
    if count <= _NUM_PARAMETERS:
        return items
    first = step * _NUM_PARAMETERS % count
    return [items[(first + i) % count] for i in range(_NUM_PARAMETERS)]


def sample_of(tensors: Iterable[Tensor], step: int) -> int:
    """Return a checksum of some bytes of each tensor; ``step`` selects the bytes.

    Tensors must be on the CPU, without gaps in memory, and not empty.
    """
    total = 0
    for tensor in tensors:
        total = crc32(_bytes_of(tensor, tensor.nbytes, step), total)
    return total


def _bytes_of(parameter: Tensor, num_bytes: int, step: int) -> bytes:
    part = _part(num_bytes, step)
    return ctypes.string_at(parameter.data_ptr() + part.start, part.stop - part.start)


def _part(num_bytes: int, step: int) -> slice:
    offset = step % -(-num_bytes // _NUM_BYTES) * _NUM_BYTES
    return slice(offset, min(offset + _NUM_BYTES, num_bytes))


def _bytes_in(parameter: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps as a view, in memory order."""
    return parameter.detach().as_strided((parameter.numel(),), (1,)).view(torch.uint8)


def _is_dense(parameter: Tensor) -> bool:
    """Return whether the elements are in memory without gaps or overlaps."""
    # is_contiguous() ignores strides of dimensions of size one; ``like`` accepts channels_last.
    like = torch.empty_like(parameter, device="meta")
    return parameter.is_contiguous() or like.stride() == parameter.stride()


def checksum_of(tensor: Tensor, total: int = 0) -> int:
    """Return the CRC-32 of the elements of a tensor, continued from ``total``."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor
    return crc32(host_bytes(dense), total)
