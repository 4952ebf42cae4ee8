"""A shard that learns its place has the crc32 of its bytes, though few of them were read."""

import h5py
import numpy as np
import pytest

from hpctrain.core.atomic import crc32_of
from hpctrain.data.format.part import number
from hpctrain.data.writer import write_arrays


@pytest.mark.parametrize("num_fields", [1, 300])
@pytest.mark.parametrize("num_samples", [1, 5000])
def test_the_crc32_is_that_of_the_file(tmp_path, num_fields, num_samples):
    values = np.arange(num_samples)
    arrays = {f"field_with_a_long_name_{index}": values for index in range(num_fields)}
    (shard,) = write_arrays(tmp_path, arrays, samples_per_shard=num_samples).shards
    path = tmp_path / shard.file
    before = path.read_bytes()
    for index, first_index in ((7, 10**12), (0, 0)):
        shard = number(path, shard, index=index, first_index=first_index)
        assert (shard.crc32, shard.num_bytes) == (crc32_of(path), path.stat().st_size)
        with h5py.File(path) as file:
            assert (file.attrs["shard"], file.attrs["first_index"]) == (index, first_index)
    assert path.read_bytes() == before
