"""The protocol of orders of an epoch's samples."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import GIB
from hpctrain.data.mixture import Mixture
from hpctrain.data.order.order import Order, Sequential, global_order
from hpctrain.data.order.window import WindowOrder, WindowShape
from hpctrain.data.samples import Samples

OrderName = Literal["auto", "global", "window", "sequential"]

FAST_ALONE_BYTES = 100_000
"""Samples of this size are read as fast one by one as in blocks of neighbours."""
CACHED_BYTES = GIB  # a data set of this size stays in memory once it was read


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordering:
    """An order of every epoch: the same for all ranks, and after a change of their number."""

    name: Literal["global", "window", "sequential"]
    shape: WindowShape | None = None  # of a window order

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Read what ``record`` returns, among other things.

        Raises ``KeyError, TypeError, ValueError``: it is not there.
        """
        name, shape = record["order"], None
        if name == "window":
            shape = WindowShape(**{key: int(record[key]) for key in ("block", "window", "lanes")})
        elif name not in ("global", "sequential"):
            raise ValueError(f"no order {name!r}")
        return cls(name=name, shape=shape)

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        sizes = asdict(self.shape) if self.shape else dict.fromkeys(("block", "window", "lanes"))
        return {"order": self.name, **sizes}

    @classmethod
    def choose(
        cls, name: OrderName, dataset: Samples, global_batch: int, shape: WindowShape | None
    ) -> Self:
        """Choose what is left open: by the size of samples and data set, never by the machine."""
        if name not in ("auto", "global", "window", "sequential"):
            raise DataError(f"order is auto, global, window or sequential, got {name!r}")
        if isinstance(dataset, Mixture):
            if name not in ("auto", "sequential"):
                raise DataError(f'a mixture has an order of its own: order="auto", got {name!r}')
            return cls(name="sequential")
        if shape is not None and name not in ("auto", "window"):
            raise DataError(f'window= is for order="window", got order={name!r}')
        if name == "window" or (name == "auto" and shape is not None):
            chosen = shape or WindowShape.of(
                global_batch, dataset.sample_bytes, dataset.block_size
            )
            return cls(name="window", shape=chosen)
        if name != "auto":
            return cls(name=name)
        chosen = WindowShape.of(global_batch, dataset.sample_bytes, dataset.block_size)
        if (
            dataset.sample_bytes >= FAST_ALONE_BYTES
            or len(dataset) * dataset.sample_bytes <= CACHED_BYTES
            or len(dataset) <= chosen.num_samples
        ):
            return cls(name="global")
        return cls(name="window", shape=chosen)

    def order(self, dataset: Samples, seed: int, epoch: int) -> Order:
        """Return the order of an epoch."""
        if isinstance(dataset, Mixture):
            return dataset.order(epoch)
        if self.name == "sequential":
            return Sequential()
        if self.shape is not None:
            return WindowOrder(len(dataset), seed, epoch, self.shape)
        return global_order(len(dataset), seed, epoch)
