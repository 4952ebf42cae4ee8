"""Read packed data sets with plain h5py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.data.packing.pack import PackConfig, Packed, pack
from tests.data.plain import read_whole


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., tuple[Packed, dict[str, list[Any]]]]:
    """Pack a source, and read the result."""

    def run(source: object, **config: Any) -> tuple[Packed, dict[str, list[Any]]]:
        directory = tmp_path / "packed"
        done = pack(source, directory, PackConfig(overwrite=True, **config))
        return done, read_whole(directory)

    return run
