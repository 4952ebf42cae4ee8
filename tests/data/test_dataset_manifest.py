"""Check that a manifest is read back as written, or rejected with the reason."""

import json
import zlib
from dataclasses import replace

import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import MANIFEST, Field, Manifest, Place, ShardEntry


def manifest(**changes):
    values = {
        "uuid": "0123456789abcdef",
        "split": "train",
        "block_size": 16,
        "fields": {"x": Field(shape=(8, 8), dtype="<f4"), "y": Field(shape=(), dtype="|u1")},
        "shards": (
            ShardEntry(
                file="train-01234567-00000-of-00001.h5",
                num_samples=20,
                num_bytes=8192,
                crc32=7,
                places={
                    "x": Place(offset=2048, crc_offset=800, crc32=1),
                    "y": Place(offset=None, crc_offset=900, crc32=2),
                },
            ),
        ),
    }
    return Manifest(**{**values, **changes})


def rewrite(directory, **changes):
    """Change the manifest and update its crc32, as another program might."""
    path = directory / MANIFEST
    record = {**json.loads(path.read_text()), **changes}
    del record["crc32"]
    crc32 = zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({"crc32": crc32, **record}))


def field_record(**changes):
    return {"shape": [], "dtype": "<f4", "ragged": False, "filter": None, **changes}


def test_a_manifest_is_read_back_as_written(tmp_path):
    manifest().write(tmp_path)
    assert Manifest.read(tmp_path) == manifest()


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_found(tmp_path):
    manifest().write(tmp_path)
    path = tmp_path / MANIFEST
    whole = path.read_bytes()
    for byte in range(len(whole)):
        flipped = bytearray(whole)
        flipped[byte] ^= 1 << byte % 8
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=MANIFEST):
            Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, "must be .*, got 'other'"),
        ({"version": 2, "reader": "1.7"}, "at most 1, got 2; install hpctrain 1.7 or later$"),
        ({"shards": [{}]}, "KeyError"),
        ({"fields": {"x": field_record(), "y": field_record(ragged=True)}}, "must have an index"),
        ({"fields": {"x": field_record(filter="lzma")}}, "None or zstd, got 'lzma'"),
        ({"fields": {"x": None}}, "TypeError"),
        ({"shards": []}, "must name at least one shard, got none"),
        ({"block_size": 1.5}, "numbers must be integers, .*got 1.5"),
        ({"block_size": 2**63}, "below 2\\^62"),
        ({"fields": {"x": field_record(shape=[2.0]), "y": field_record()}}, "integers"),
    ],
)
def test_manifest_of_another_kind_raises(tmp_path, changes, words):
    manifest().write(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(DataError, match=words):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "7", '{"format": ', "{}", "\0", "[" * 100_000])
def test_invalid_manifest_raises(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DataError, match="must be the manifest of a data set"):
        Manifest.read(tmp_path)


def test_directory_without_a_manifest_raises(tmp_path):
    with pytest.raises(DataError, match="has none"):
        Manifest.read(tmp_path)


def one_shard(**changes):
    return {"shards": (replace(manifest().shards[0], **changes),)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "../up"}, "split"),
        ({"block_size": 0}, "block_size"),
        ({"fields": {}}, "at least one field"),
        ({"fields": {"a b": Field(shape=(), dtype="<f4")}}, "name of a Python variable"),
        (one_shard(file="../../etc/passwd"), "plain file name"),
        (one_shard(num_samples=0), "must have samples"),
        (one_shard(num_bytes=2048 + 20 * 256 - 1), "has 5120 bytes from byte 2048"),
        (one_shard(places={}), "must have the fields"),
    ],
)
def test_invalid_values_are_reported(changes, words):
    with pytest.raises(DataError, match=words):
        manifest(**changes)


@pytest.mark.parametrize("dtype", [">f4", "<c8", "|O", "<M8[s]", "<f16", "what", "float32"])
def test_dtype_without_tensors_raises(dtype):
    with pytest.raises(DataError, match="dtype"):
        Field(shape=(), dtype=dtype)


def test_any_byte_order_becomes_little_endian():
    assert Field.of((2,), ">f4") == Field(shape=(2,), dtype="<f4")
    assert Field.of((2,), "f4").sample_bytes == 8
