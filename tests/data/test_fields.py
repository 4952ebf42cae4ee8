"""Check that fields of every kind hold the written values, for any form of input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data.format import hdf5_values as zstd
from hpctrain.data.format.dataset_manifest import Field, Manifest
from hpctrain.data.samples import Ragged
from hpctrain.data.writer import ShardWriter, write_arrays
from tests.data.plain import read_whole

KINDS = {
    "fixed": Field.of((2, 3), "f4"),
    "number": Field.of((), "i8"),
    "packed": Field.of((5,), "u2", compression="zstd"),
    "text": Field.of((), "i4", ragged=True),
    "boxes": Field.of((4,), "f4", ragged=True),
    "packed_text": Field.of((), "u1", ragged=True, compression="zstd"),
    **{f"of_{kind}": Field.of((), kind, ragged=True) for kind in ("bool", "i2", "u8", "f2", "f8")},
    "nothing": Field.of((0,), "f4", compression="zstd"),
    "empty_rows": Field.of((0,), "f4", ragged=True, compression="zstd"),
}


def samples_of(field, num_samples, rng):
    lengths = rng.integers(0, 6, num_samples) * rng.integers(0, 2)
    shapes = [(length, *field.shape) if field.ragged else field.shape for length in lengths]
    return [rng.integers(0, 200, shape).astype(field.dtype) for shape in shapes]


def given_as(field, samples, rng):
    """Return the samples in each form in which a program may pass them."""
    if not field.ragged:
        return np.array(samples, field.dtype).reshape(len(samples), *field.shape)
    if samples and rng.integers(0, 2):
        return Ragged.of([torch.from_numpy(sample) for sample in samples])
    return samples


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=4).filter(any),
    per_shard=st.integers(3, 40),
    block_size=st.integers(1, 20),
    chunk_bytes=st.sampled_from([1, 100, 2**21]),
    seed=st.integers(0, 1000),
)
def test_all_kinds_of_fields_hold_what_was_written(
    tmp_path_factory, lengths, per_shard, block_size, chunk_bytes, seed
):
    directory = tmp_path_factory.mktemp("set")
    rng = np.random.default_rng(seed)
    wanted = {name: samples_of(field, sum(lengths), rng) for name, field in KINDS.items()}
    sizes = {"samples_per_shard": per_shard, "block_size": block_size}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zstd, "CHUNK_BYTES", chunk_bytes)
        with ShardWriter(directory, KINDS, **sizes) as writer:
            start = 0
            for length in lengths:
                some = slice(start, start + length)
                writer.append({n: given_as(KINDS[n], v[some], rng) for n, v in wanted.items()})
                start += length
    read = read_whole(directory)
    assert len(writer.manifest.shards) == -(-sum(lengths) // per_shard)
    for name, samples in wanted.items():
        assert len(read[name]) == len(samples)
        assert all(map(np.array_equal, read[name], samples)), name


def test_program_may_change_arrays_after_writing(tmp_path):
    fields = {"text": KINDS["text"], "packed": KINDS["packed"]}
    text, packed = np.arange(3, dtype="i4"), np.ones((1, 5), "u2")
    with ShardWriter(tmp_path, fields, samples_per_shard=9) as writer:
        for _ in range(2):
            writer.append({"text": [text], "packed": packed})
            text += 10
            packed += 1
    read = read_whole(tmp_path)
    assert [sample.tolist() for sample in read["text"]] == [[0, 1, 2], [10, 11, 12]]
    assert [sample.tolist() for sample in read["packed"]] == [[1] * 5, [2] * 5]


def test_one_word_compresses_every_field(tmp_path):
    arrays = {"x": np.zeros((9, 3), "f4"), "t": Ragged.of([torch.arange(n) for n in range(9)])}
    manifest = write_arrays(tmp_path, arrays, samples_per_shard=4, compression="zstd")
    assert manifest == Manifest.read(tmp_path)
    assert {field.compression for field in manifest.fields.values()} == {"zstd"}
    read = read_whole(tmp_path)
    assert [len(sample) for sample in read["t"]] == list(range(9))
    assert all(shard.places["t"].offset is None for shard in manifest.shards)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([np.zeros((2, 3), "f4")], r"shape \(length, \*\(4,\)\), got \(2, 3\)"),
        ([np.zeros((2, 4), "f8")], "for all values of float64"),
        (7, r"must be a list of arrays \(length, \*\(4,\)\), got int"),
        ([3], r"got \(\)"),
        (
            Ragged(torch.zeros(3, 4), torch.tensor([0, 2, 1])),
            "field boxes must increase",
        ),
        (Ragged(torch.zeros(3, 4), torch.tensor([0, 4])), "from 0 to 3"),
        (Ragged(torch.zeros(3, 2), torch.tensor([0, 3])), r"\(num_rows, \*\(4,\)\)"),
    ],
)
def test_ragged_samples_that_do_not_fit_are_reported(tmp_path, samples, words):
    fields = {"boxes": KINDS["boxes"]}
    with (
        pytest.raises(DataError, match=words),
        ShardWriter(tmp_path, fields, samples_per_shard=3) as writer,
    ):
        writer.append({"boxes": samples})
    assert not list(tmp_path.iterdir())


def test_a_block_larger_than_a_chunk_is_reported(tmp_path):
    fields = {"x": ((2**20,), "f8")}
    with pytest.raises(DataError, match="smaller block_size"):
        ShardWriter(tmp_path, fields, samples_per_shard=9, block_size=512, compression="zstd")


def test_missing_package_is_reported_with_the_command_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    with pytest.raises(DataError, match=r'pip install "hpctrain\[zstd\]"'):
        write_arrays(tmp_path, {"x": [1]}, samples_per_shard=1, compression="zstd")


LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def samples(lengths, *shape):
    return [torch.full((length, *shape), float(i)) for i, length in enumerate(lengths)]


@given(LENGTHS)
def test_samples_are_returned_at_their_positions(lengths):
    ragged = Ragged.of(samples(lengths, 2))
    assert len(ragged) == len(lengths)
    assert ragged.lengths.tolist() == lengths
    for index, sample in enumerate(samples(lengths, 2)):
        assert torch.equal(ragged[index], sample)
        assert torch.equal(ragged[index - len(lengths)], sample)
    assert [torch.equal(*pair) for pair in zip(ragged, samples(lengths, 2), strict=True)]


@given(LENGTHS, st.integers(0, 3))
def test_padded_rows_hold_the_sample_and_then_the_filling(lengths, more):
    rows = Ragged.of(samples(lengths, 2)).padded(-1, max(lengths) + more)
    assert rows.shape == (len(lengths), max(lengths) + more, 2)
    for row, sample in zip(rows, samples(lengths, 2), strict=True):
        assert torch.equal(row[: len(sample)], sample)
        assert (row[len(sample) :] == -1).all()


def test_a_part_of_samples_is_padded_like_the_whole():
    """Offsets need not start at 0, nor end at the end of the values."""
    whole = Ragged.of(samples([2, 3, 0, 1]))
    part = Ragged(whole.values, whole.offsets[1:4])
    assert torch.equal(part.padded(), whole.padded()[1:3])


def test_missing_or_long_values_raise():
    with pytest.raises(DataError, match="not be longer than 2, but one has 3"):
        Ragged.of(samples([1, 3])).padded(length=2)
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"from -2 to 1, got {index}"):
            Ragged.of(samples([1, 3]))[index]


def test_samples_are_moved_unchanged():
    ragged = Ragged.of(samples([1, 3]))
    moved = ragged.to("meta")
    assert (moved.values.device.type, moved.offsets.device.type) == ("meta", "meta")
    assert torch.equal(ragged.to("cpu").values, ragged.values)
