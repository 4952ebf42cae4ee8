"""The source text of Python's standard library as windows of bytes, packed in HDF5."""

import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain import DataError
from hpctrain.comm import Communicator
from hpctrain.data import MANIFEST, ShardedDataset, Subset, write_arrays

FILES_PER_TEST_FILE = 20
"""One in this number of files is used for tests only."""


def open_text(comm: Communicator, folder: Path, length: int) -> dict[str, ShardedDataset]:
    """Return data sets ``train`` and ``test`` of windows of ``length + 1`` bytes. Collective.

    Rank 0 packs them in the first run, from different files.
    """
    root, refusal = folder / f"windows-{length}", None
    if comm.rank == 0:
        try:
            pack(root, length)
        except (DataError, OSError) as error:
            refusal = f"cannot pack the text of Python's library into {root}: {error}"
    comm.agree(refusal is None, refusal or "")
    return {split: ShardedDataset.open(root / split, comm) for split in ("train", "test")}


def windows(
    comm: Communicator, folder: str, length: int, num_windows: int, num_test: int
) -> tuple[Subset, Subset]:
    """Return the first training and test windows, for ``lm.toml``. Collective."""
    text = open_text(comm, Path(folder), length)
    return Subset(text["train"], range(num_windows)), Subset(text["test"], range(num_test))


def shifted(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split windows into bytes and their following bytes."""
    found = columns["bytes"].long()
    return {"given": found[:, :-1], "following": found[:, 1:]}


def pack(root: Path, length: int) -> None:
    """Write missing data sets."""
    for split in ("train", "test"):
        if (root / split / MANIFEST).exists():
            continue
        text = b"".join(
            path.read_bytes()
            for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            if (zlib.crc32(path.name.encode()) % FILES_PER_TEST_FILE == 0) == (split == "test")
        )
        num_windows = len(text) // (length + 1)
        windows = np.frombuffer(text, np.uint8)[: num_windows * (length + 1)].reshape(
            num_windows, -1
        )
        write_arrays(root / split, {"bytes": windows}, samples_per_shard=8192, split=split)


def batch(text: ShardedDataset, step: int, size: int, replica: int, replicas: int) -> Tensor:
    """Return the part of a replica of the batch of a step, ``(size / replicas, length + 1)``.

    The batch of a step does not depend on the number of ranks, so a run can resume in another
    layout.
    """
    per_epoch = len(text) // size
    random = torch.Generator().manual_seed(step // per_epoch)
    first = step % per_epoch * size
    chosen = torch.randperm(len(text), generator=random)[first : first + size]
    windows: Tensor = text.take(chosen[replica::replicas].numpy())["bytes"]
    return windows.long()
