"""The tools of HDF5 1.10, which clusters still have, read every shard."""

import subprocess

import numpy as np
import pytest
import torch

from hpctrain.data.format.layout import Manifest
from hpctrain.data.samples import Ragged
from hpctrain.data.writer import write_arrays

pytestmark = pytest.mark.requires("h5dump")


def h5dump(*words):
    done = subprocess.run(["h5dump", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def arrays(num_samples):
    text = [torch.arange(n % 4) for n in range(num_samples)]
    return {"x": np.arange(3 * num_samples).reshape(-1, 3), "text": Ragged.of(text)}


def test_h5dump_reads_values_lengths_checksums_and_attributes(tmp_path):
    (shard,) = write_arrays(tmp_path, arrays(6), samples_per_shard=6, block_size=4).shards
    path = tmp_path / shard.file
    assert "(5,0): 15, 16, 17" in h5dump("-d", "/data/x", path)
    assert "(0): 0, 0, 1, 0, 1, 2, 0" in h5dump("-d", "/data/text", path)
    assert "(0): 0, 0, 1, 3, 6, 6, 7" in h5dump("-d", "/index/text", path)
    assert "H5T_STD_U32LE" in h5dump("-d", "/crc/x", path)
    assert "hpctrain-h5" in h5dump("-a", "/format", path)
    assert "(0): 6" in h5dump("-a", "/n", path)
    assert '"ragged": true' in h5dump("-a", "/fields", path).replace("\\", "")


@pytest.mark.parametrize("num_samples", [6, 500_000])
def test_h5dump_opens_a_compressed_shard(tmp_path, num_samples):
    """Short and of several chunks."""
    rows = {"x": np.arange(num_samples)}
    (shard,) = write_arrays(
        tmp_path, rows, samples_per_shard=num_samples, compression="zstd"
    ).shards
    text = h5dump("-H", "-p", tmp_path / shard.file)
    assert f"( {num_samples} ) / ( H5S_UNLIMITED )" in text
    assert "CHECKSUM FLETCHER32" in text
    assert "FILTER_ID 32015" in text
    assert Manifest.read(tmp_path).shards == (shard,)
