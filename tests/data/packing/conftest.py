"""What was packed, read by plain h5py."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import pytest

from hpctrain.data.format.layout import Manifest
from hpctrain.data.packing.pack import PackConfig, Packed, pack


def read(directory: Path) -> dict[str, list[Any]]:
    """Return all samples of each field: arrays, and of ragged fields arrays of some length."""
    manifest = Manifest.read(directory)
    found: dict[str, list[Any]] = {name: [] for name in manifest.fields}
    for shard in manifest.shards:
        with h5py.File(directory / shard.file) as file:
            for name, field in manifest.fields.items():
                rows = file[f"data/{name}"][:]
                if field.ragged:
                    ends = file[f"index/{name}"][:].astype(int)
                    rows = [rows[a:b] for a, b in pairwise(ends)]
                found[name] += list(rows)
    return found


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., tuple[Packed, dict[str, list[Any]]]]:
    """Pack a source, and read what came of it."""

    def run(source: object, **config: Any) -> tuple[Packed, dict[str, list[Any]]]:
        directory = tmp_path / "packed"
        done = pack(source, directory, PackConfig(overwrite=True, **config))
        return done, read(directory)

    return run
