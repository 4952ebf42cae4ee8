"""Sharded data sets: written, read, ordered, staged.

Every name is loaded at its first use.
"""

from typing import TYPE_CHECKING

from hpctrain.core.lazy import exports

if TYPE_CHECKING:
    from hpctrain.data.format.layout import MANIFEST, Field
    from hpctrain.data.loader import Loader
    from hpctrain.data.mixture import Mixture
    from hpctrain.data.order.window import WindowShape
    from hpctrain.data.reader import ShardedDataset
    from hpctrain.data.staging import stage
    from hpctrain.data.subset import Subset
    from hpctrain.data.torch_dataloader import Stream, collate
    from hpctrain.data.transform import PerSample
    from hpctrain.data.writer import ShardWriter, write_arrays

_HOME = {
    "hpctrain.data.format.layout": (
        "Field",
        "MANIFEST",
    ),
    "hpctrain.data.loader": ("Loader",),
    "hpctrain.data.mixture": ("Mixture",),
    "hpctrain.data.order.window": ("WindowShape",),
    "hpctrain.data.reader": ("ShardedDataset",),
    "hpctrain.data.staging": ("stage",),
    "hpctrain.data.subset": ("Subset",),
    "hpctrain.data.torch_dataloader": (
        "Stream",
        "collate",
    ),
    "hpctrain.data.transform": ("PerSample",),
    "hpctrain.data.writer": (
        "ShardWriter",
        "write_arrays",
    ),
}

__all__ = [
    "MANIFEST",
    "Field",
    "Loader",
    "Mixture",
    "PerSample",
    "ShardWriter",
    "ShardedDataset",
    "Stream",
    "Subset",
    "WindowShape",
    "collate",
    "stage",
    "write_arrays",
]

__getattr__, __dir__ = exports(__name__, _HOME)
