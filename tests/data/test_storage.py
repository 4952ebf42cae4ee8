"""What the system refuses is told at the next check; HDF5 never hears of it."""

import h5py
import numpy as np
import pytest

from hpctrain.data.format.part import PartFile
from tests.full_disk import largest_file


def test_hdf5_writes_and_reads_through_it(tmp_path):
    path, values = tmp_path / "file.h5", np.arange(30_000).reshape(-1, 3)
    storage = PartFile(path, "w+b")
    with h5py.File(storage, "w") as file:
        file["x"] = values
        assert np.array_equal(file["x"][5:7], values[5:7])
    storage.check()
    storage.close()
    with h5py.File(path) as file:
        assert np.array_equal(file["x"], values)


@pytest.mark.parametrize("num_bytes", [0, 100, 3000, 50_000])
def test_a_full_disk_is_told_by_check_and_only_there(tmp_path, num_bytes):
    path = tmp_path / "file.h5"
    with largest_file(num_bytes):
        storage = PartFile(path, "w+b")
        with h5py.File(storage, "w") as file:
            file["x"] = np.arange(30_000)
            file["y"] = [1]
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                storage.check()
        storage.close()
    assert path.stat().st_size <= num_bytes


def test_a_signal_in_the_middle_is_told_by_check(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    storage = PartFile(tmp_path / "file.h5", "w+b")
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", interrupt)
        with h5py.File(storage, "w") as file:
            file["x"] = np.arange(30_000)
    with pytest.raises(KeyboardInterrupt):
        storage.check()
    storage.close()
