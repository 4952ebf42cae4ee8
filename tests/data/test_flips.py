"""No flipped bit of the data is ever delivered."""

import random
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.layout import Field, Manifest
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import ShardWriter
from tests.data.mixed_set import IN_MEMORY, flip, mixed

FLIPS_EACH = 100


@pytest.fixture(scope="module", params=[None, "zstd"])
def directory(request):
    """Give a data set in memory with fixed and ragged fields, plain or all compressed."""
    fields = {
        "image": Field.of((3, 2), "f4"),
        "number": Field.of((), "i8"),
        "text": Field.of((), "i4", ragged=True),
    }
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        with ShardWriter(
            Path(folder), fields, samples_per_shard=40, block_size=7, compression=request.param
        ) as writer:
            writer.append({name: mixed(100)[name] for name in fields})
        yield Path(folder)


def data_bytes(path, shard, name, manifest):
    """Return the position of every byte of a field in its file."""
    place, field = shard.places[name], manifest.fields[name]
    if place.offset is not None:
        num_rows = place.num_rows if field.ragged else shard.num_samples
        return range(place.offset, place.offset + num_rows * field.sample_bytes)
    with h5py.File(path) as file:
        data = file[f"data/{name}"].id
        chunks = [data.get_chunk_info(number) for number in range(data.get_num_chunks())]
    return [at for c in chunks for at in range(c.byte_offset, c.byte_offset + c.size)]


def is_refused(dataset, samples, path):
    """Tell whether samples cannot be had, and the error names a range of them and the file."""
    try:
        dataset.take(samples)
    except CorruptError as error:
        return (
            path.name in str(error) and samples[0] <= error.start < error.stop <= samples[-1] + 1
        )
    return False


@pytest.mark.parametrize("io", ["map", "read"])
def test_every_flipped_bit_of_the_data_is_found(directory, io):
    manifest = Manifest.read(directory)
    dice = random.Random(0)
    places, first = [], 0
    for shard in manifest.shards:
        samples = np.arange(first, first + shard.num_samples)
        path = directory / shard.file
        for name in manifest.fields:
            places += [(path, samples, at) for at in data_bytes(path, shard, name, manifest)]
        first += shard.num_samples
    for path, samples, at in dice.sample(places, FLIPS_EACH):
        bit = dice.randrange(8)
        flip(path, at, bit)
        assert is_refused(ShardedDataset(directory, io=io, manifest=manifest), samples, path)
        flip(path, at, bit)
    assert len(ShardedDataset(directory, io=io).take(np.arange(100))["number"]) == 100


def test_a_flipped_bit_anywhere_is_found_or_harmless(directory):
    manifest, whole = Manifest.read(directory), mixed(100)
    dice = random.Random(1)
    for _ in range(100):
        shard = dice.choice(manifest.shards)
        at, bit = dice.randrange(shard.num_bytes), dice.randrange(8)
        flip(directory / shard.file, at, bit)
        try:
            # Any other error than the one that is meant for users fails the test.
            read = ShardedDataset(directory, manifest=manifest).take(np.arange(100))
        except DataError:
            pass
        else:
            assert np.array_equal(read["image"], whole["image"])
            assert np.array_equal(read["number"], whole["number"])
            assert np.array_equal(read["text"].values, np.concatenate(whole["text"]))
        flip(directory / shard.file, at, bit)
