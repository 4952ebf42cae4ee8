"""Loaders of other projects: MosaicML streaming and webdataset, if they are installed.

The packages are imported from the folder ``.venv-peers`` next to ``perf``, after all other
folders: ``pip install --no-deps --target .venv-peers -r perf/peers.txt``.

MosaicML imports torchvision and transformers for data sets that this program does not use, and
torchvision of the package index does not work with every build of torch. Empty modules with the
imported names replace both packages.
"""

import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from data_methods import SHARDS, Epoch, Kind, Method, Pair
from numpy.typing import NDArray
from torch.utils.data import DataLoader

FOLDER = Path(__file__).resolve().parents[1] / ".venv-peers"
SHUFFLE_BUFFER = 1000
"""Samples; webdataset's documentation uses this figure."""

_NAMES = {
    "torchvision.datasets": "VisionDataset",
    "torchvision.transforms.functional": "to_tensor",
    "transformers.feature_extraction_utils": "BatchFeature",
    "transformers.tokenization_utils_base": "BatchEncoding",
    "transformers.models.auto.tokenization_auto": "AutoTokenizer",
}
"""What MosaicML imports from packages that it does not need here."""


class Mosaic(Method):
    """MosaicML streaming: files and shuffle of MosaicML, DataLoader of torch in this process."""

    name = "MosaicML streaming"
    form = "mds"
    _dataset: Any = None

    @classmethod
    def write(cls, kind: Kind, samples: NDArray[np.uint8], path: Path) -> None:
        """Write MDS shards, not compressed."""
        shape = ",".join(map(str, kind.shape))
        columns = {"x": f"ndarray:uint8:{shape}", "y": "int"}
        limit = kind.num_bytes // SHARDS
        with streaming().MDSWriter(out=str(path), columns=columns, size_limit=limit) as writer:
            for number, sample in enumerate(samples):
                writer.write({"x": np.asarray(sample), "y": number})

    def prepare(self) -> None:
        """Open the data set, which counts its epochs."""
        if self._dataset is None:
            self._dataset = streaming().StreamingDataset(
                local=str(self.path), shuffle=True, batch_size=self.batch
            )

    def close(self) -> None:
        """Remove the shared memory of the package, which remains after a forked process ends."""
        if self._dataset is not None:
            for memory in _shared_memory(self._dataset):
                memory.cleanup()
        self._dataset = None

    def epoch(self) -> Epoch:
        """Read an epoch."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            try:
                for batch in DataLoader(self._dataset, batch_size=self.batch):
                    yield batch["x"], batch["y"]
            finally:
                vars(self._dataset)["_iterator"].exit()  # otherwise its threads continue


class Tars(Method):
    """webdataset: tar files in random order, then a shuffle buffer, in this process."""

    name = "webdataset"
    form = "tars"

    @classmethod
    def write(cls, kind: Kind, samples: NDArray[np.uint8], path: Path) -> None:
        """Write tar files of raw bytes."""
        path.mkdir()
        per_shard = -(-kind.num_samples // SHARDS)
        for shard in range(SHARDS):
            first = shard * per_shard
            with webdataset().TarWriter(str(path / f"{shard}.tar")) as writer:
                for number, sample in enumerate(samples[first : first + per_shard], first):
                    record = {"__key__": f"{number:08d}", "x": sample.tobytes()}
                    writer.write(record | {"y": str(number).encode()})

    def epoch(self) -> Epoch:
        """Read an epoch."""
        files = [str(path) for path in sorted(self.path.iterdir())]
        opened = webdataset().WebDataset(files, shardshuffle=SHARDS)
        chosen = opened.shuffle(SHUFFLE_BUFFER).map(self._decode)
        yield from chosen.batched(self.batch, collation_fn=_stack)

    def _decode(self, record: Mapping[str, bytes]) -> tuple[NDArray[np.uint8], int]:
        return np.frombuffer(record["x"], np.uint8).reshape(self.kind.shape), int(record["y"])


PEERS = {"mosaicml-streaming": Mosaic, "webdataset": Tars}
"""Package and method."""


def installed() -> dict[type[Method], str | None]:
    """Return the version of each peer; None for a missing package."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    found: dict[type[Method], str | None] = {}
    for package, method in PEERS.items():
        try:
            found[method] = version(package)
        except PackageNotFoundError:
            found[method] = None
    return found


@cache
def streaming() -> Any:
    """Import MosaicML streaming."""
    for module, name in _NAMES.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            empty = ModuleType(".".join(parts[:end]))
            empty.__path__ = []
            sys.modules.setdefault(empty.__name__, empty)
        setattr(sys.modules[module], name, type(name, (), {}))
    return importlib.import_module("streaming")


def webdataset() -> Any:
    """Import webdataset."""
    return importlib.import_module("webdataset")


def _shared_memory(owner: Any) -> Iterator[Any]:
    for value in vars(owner).values():
        if hasattr(value, "created_shms"):
            yield value
        elif type(value).__module__.startswith("streaming.base.shared"):
            yield from _shared_memory(value)


def _stack(samples: list[tuple[NDArray[np.uint8], int]]) -> Pair:
    x, y = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(x)), torch.tensor(y)
