"""Offloading of parameters and optimizer state to a file on a local disk."""

import mmap
import os
import tempfile
from collections import defaultdict
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpctrain.core.atomic import refusal
from hpctrain.core.errors import ConfigError
from hpctrain.core.libc import advise_memory, file_system_magic, trim_heap
from hpctrain.core.paths import absolute
from hpctrain.core.units import MIB, format_bytes
from hpctrain.gradients.elementwise import PieceStep
from hpctrain.parallel.guard_facts import part

BUCKET_ELEMENTS = 2 * MIB
"""Number of parameter elements that are updated together."""
_IN_MEMORY = {0x01021994, 0x858458F6}  # tmpfs, ramfs
_ALIGNED = 64  # bytes; alignment for vector instructions
_VALUES = ""  # key of the slot with the parameter; other slots contain optimizer state

Slots: TypeAlias = dict[str, Tensor]


class _Slice(NamedTuple):
    """Range of elements of a parameter in a bucket, with the index of the parameter group."""

    group: int
    parameter: Any
    elements: slice


class FileState:
    """Stores shards of parameters and optimizer state in an unnamed file.

    The file is deleted at the end of the process. The constructor reserves the blocks of the file,
    so a disk that becomes full later causes no error. Pages that are not written yet, or that are
    read ahead, occupy the page cache; the kernel can reclaim this memory.

    Args:
        optimizer: optimizer of the parameters, before they are sharded.
        folder: folder on a local disk.
        num_shards: number of ranks that divide each parameter.
        masters: dtype to which narrower parameters are promoted; None to keep their dtypes.

    Raises:
        ConfigError: the space cannot be reserved, or the folder is in memory.
    """

    def __init__(
        self, optimizer: Optimizer, folder: str, num_shards: int, masters: torch.dtype | None
    ) -> None:
        self._optimizer, self._steps = optimizer, PieceStep(optimizer)
        self._steps.read(optimizer)
        self._slots: dict[Any, Slots] = {}
        self._buckets: list[list[_Slice]] = [[]]
        self._held: list[list[Any]] = []
        forms: list[list[tuple[str, torch.dtype, int, int]]] = []
        num_bytes = 0
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                dtype = torch.promote_types(p.dtype, masters) if masters else p.dtype
                parts = self._steps.parts(number, dtype, tuple(p.shape))
                kinds = {_VALUES: dtype}
                kinds |= {key: part.dtype for key, part in parts.items() if part.shape is None}
                numel = -(-p.shape[0] // num_shards) * p[0].numel()
                forms.append([])
                for key, kind in kinds.items():
                    forms[-1].append((key, kind, numel, num_bytes))
                    num_bytes += -(-numel * kind.itemsize // _ALIGNED) * _ALIGNED
        space = _reserved(absolute(folder), num_bytes)
        self._forms = [
            {k: torch.frombuffer(space, dtype=t, count=n, offset=at) for k, t, n, at in some}
            for some in forms
        ]

    @torch.no_grad()
    def take_over(self) -> None:
        """Move the shards that are now the parameters of the optimizer into the file."""
        slots, room = iter(self._forms), BUCKET_ELEMENTS
        for number, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                # FSDP identifies the local tensor by its storage. to_local() would return another
                # tensor object.
                local: Any = part(p)
                whole = next(slots)
                numel, begin = local.numel(), 0
                self._slots[p] = {key: slot[:numel] for key, slot in whole.items()}
                local.set_(self._slots[p][_VALUES].view(local.shape).copy_(local))
                while begin < max(numel, 1):
                    end = min(numel, begin + room)
                    self._buckets[-1].append(_Slice(number, p, slice(begin, end)))
                    begin, room = max(end, 1), room - (end - begin)
                    if not room:
                        self._buckets.append([])
                        room = BUCKET_ELEMENTS

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient, bucket by bucket; read one bucket ahead.

        Then remove the parameters from the optimizer, so that the ``step()`` of the optimizer,
        which torch calls next, updates nothing; ``end_step`` restores the parameters.

        Raises:
            ConfigError: the options of the optimizer require state that the file does not
                contain; raised before any update.
        """
        groups = self._optimizer.param_groups
        self._steps.read(self._optimizer)
        self._check()
        fresh: dict[Any, dict[str, Any]] = {}
        for number, bucket in enumerate(self._buckets):
            for following in self._buckets[number + 1 : number + 2]:
                self._advise(following, mmap.MADV_WILLNEED)
            self._step_bucket([one for one in bucket if one.parameter.grad is not None], fresh)
            self._advise(bucket, mmap.MADV_DONTNEED)
            trim_heap()
        self._optimizer.state.update(fresh)
        self._held = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []

    def end_step(self) -> None:
        """Restore the parameters of the optimizer after ``step``."""
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["params"] = held

    def _step_bucket(self, bucket: list[_Slice], fresh: dict[Any, dict[str, Any]]) -> None:
        """Update the parameters of ``bucket``; store the new optimizer state in ``fresh``."""
        pieces: dict[int, list[Tensor]] = defaultdict(list)
        state = self._steps.state
        for group, p, elements in bucket:
            piece = _part(p, elements)
            piece.grad = _part(p.grad, elements)
            pieces[group].append(piece)
            for key, value in self._optimizer.state.get(p, {}).items():
                is_whole = key not in self._slots[p]  # one value per parameter, such as step
                state[piece][key] = deepcopy(value) if is_whole else _part(value, elements)
        self._steps.step(pieces)
        for (_, p, elements), piece in zip(bucket, chain(*pieces.values()), strict=True):
            kept = fresh.setdefault(p, {})
            for key, value in state.pop(piece).items():
                slot = self._slots[p].get(key)
                if slot is None or value is None:
                    kept[key] = value
                    continue
                if value.data_ptr() != slot[elements].data_ptr():
                    slot[elements] = value  # created by this step, or loaded
                place = p.device_mesh, p.placements
                form = {"shape": p.shape, "stride": p.stride(), "run_check": False}
                kept[key] = DTensor.from_local(slot.view(p.to_local().shape), *place, **form)

    def _check(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                parts = self._steps.parts(number, p.dtype, tuple(p.shape))
                needed = {key for key, part in parts.items() if part.shape is None}
                if more := needed - set(self._slots.get(p, ())):
                    raise ConfigError(
                        "options of the optimizer must not require more state than at shard(), "
                        f"but now require {', '.join(sorted(more))}; set the options before "
                        "shard()"
                    )

    def _advise(self, bucket: list[_Slice], advice: int) -> None:
        for _, p, elements in bucket:
            for slot in self._slots[p].values():
                part = slot[elements]
                if part.numel():
                    advise_memory(part.data_ptr(), part.nbytes, advice)


def _part(tensor: DTensor, elements: slice) -> Tensor:
    return tensor.to_local().view(-1)[elements]


def _reserved(folder: Path, num_bytes: int) -> mmap.mmap:
    """Return the memory map of a new unnamed file in ``folder`` with reserved blocks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if file_system_magic(file.fileno()) in _IN_MEMORY:
                raise ConfigError(
                    f"the folder of offload must be on a disk, but {folder} is in memory (tmpfs "
                    "or ramfs); use another folder"
                )
            os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))
            return mmap.mmap(file.fileno(), max(num_bytes, 1))
    except OSError as error:
        raise ConfigError(
            f"{folder} must have {format_bytes(num_bytes)} of free space per rank for offload, "
            f"but the space cannot be reserved: {refusal(error, 'use another folder')}"
        ) from error
