"""The memory in which small tensors travel together, used again and again."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.units import MIB

_MOST_VIEWS = 1 << 14
"""Views that are kept: making one costs as much as copying some KiB."""

Layout = tuple[Tensor, list[Tensor]]
"""The part of the buffer that is in use, flat, and a view of it for every tensor."""


class FusionBuffer:
    """Bytes that are looked at as tensors of some dtype, one after the other."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._layouts: OrderedDict[object, Layout] = OrderedDict()
        self._num_views = 0

    def layout(self, tensors: Sequence[Tensor], key: object = None) -> Layout:
        """Return the buffer laid out for ``tensors`` of one dtype; good until the next call.

        Args:
            tensors: whose values it shall take.
            key: equal only for tensors of the same dtype and shapes; None to make one of these.
        """
        dtype = tensors[0].dtype
        if key is None:
            key = (dtype, tuple([tensor.shape for tensor in tensors]))
        found = self._layouts.get(key)
        if found is None:
            # Made outside of inference mode: what is made inside it cannot be written later.
            with torch.inference_mode(mode=False):
                found = self._lay_out(dtype, tensors)
            self._keep(key, found)
        else:
            self._layouts.move_to_end(key)
        return found

    def _lay_out(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Layout:
        numels = [tensor.numel() for tensor in tensors]
        numel = sum(numels)
        flat = self._bytes(numel * dtype.itemsize).view(dtype)
        parts = flat.split(numels)
        return flat, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _bytes(self, num_bytes: int) -> Tensor:
        if self._memory is None or len(self._memory) < num_bytes:
            self._layouts.clear()  # they look at the memory that goes
            self._num_views = 0
            size = MIB
            while size < num_bytes:
                size *= 2
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:num_bytes]

    def _keep(self, key: object, layout: Layout) -> None:
        self._layouts[key] = layout
        self._num_views += len(layout[1])
        while self._num_views > _MOST_VIEWS and len(self._layouts) > 1:
            _, (_, views) = self._layouts.popitem(last=False)
            self._num_views -= len(views)
