"""A data set that is cut anew has the same samples in the same order."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.tools import blocks as shard_blocks
from hpctrain.data.tools import reshard, turns
from hpctrain.data.tools.copying import stream
from hpctrain.data.tools.reshard import Shape
from hpctrain.data.tools.turns import share
from hpctrain.data.tools.verify import verify
from hpctrain.data.writer import ShardWriter
from tests.data.mixed_set import files_of, flip, numbers_in, samples_in, write_mixed


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original") / "set"
    write_mixed(directory)
    (directory / "classes.txt").write_text("cat\ndog\nemu\n")
    return directory


@pytest.mark.parametrize(("per_shard", "block_size"), [(9, 1), (64, 16), (100, 3), (1000, 200)])
def test_samples_and_order_stay(original, tmp_path, per_shard, block_size):
    shape = Shape(samples_per_shard=per_shard, block_size=block_size)
    manifest = reshard.reshard(original, tmp_path, shape)
    assert samples_in(tmp_path) == samples_in(original)
    assert manifest == Manifest.read(tmp_path)
    sizes = [shard.num_samples for shard in manifest.shards]
    assert sizes == [min(per_shard, 100 - start) for start in range(0, 100, per_shard)]
    assert (manifest.block_size, manifest.split) == (block_size, "train")
    assert (tmp_path / "classes.txt").read_text() == "cat\ndog\nemu\n"
    assert verify(tmp_path).is_whole


def test_what_is_not_given_stays(original, tmp_path):
    manifest = reshard.reshard(original, tmp_path, Shape())
    before = Manifest.read(original)
    assert manifest.uuid != before.uuid
    classes = ("cat", "dog", "emu")  # from the file
    assert replace(manifest, uuid=before.uuid, shards=()) == replace(
        before, shards=(), classes=classes
    )
    assert [shard.num_samples for shard in manifest.shards] == [40, 40, 20]


def test_compression_there_and_back_is_the_identity(original, tmp_path):
    reshard.reshard(original, tmp_path / "zstd", Shape(compression="zstd"))
    assert all(f.compression == "zstd" for f in Manifest.read(tmp_path / "zstd").fields.values())
    reshard.reshard(tmp_path / "zstd", tmp_path / "none", Shape(compression="none"))
    assert Manifest.read(tmp_path / "none").fields == Manifest.read(original).fields
    assert samples_in(tmp_path / "zstd") == samples_in(tmp_path / "none") == samples_in(original)


def test_a_size_in_bytes_makes_shards_of_whole_blocks_of_about_that_size(original, tmp_path):
    mean = reshard.sample_bytes(Manifest.read(original))
    assert mean == (100 * (24 + 8 + 1) + 4 * 200 + 16 * 99) / 100
    manifest = reshard.reshard(original, tmp_path, Shape(shard_bytes=round(mean * 30)))
    assert [shard.num_samples for shard in manifest.shards] == [28, 28, 28, 16]


def test_pieces_play_no_role(original, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_blocks, "PIECE_BYTES", 1)
    reshard.reshard(original, tmp_path, Shape(samples_per_shard=30))
    assert samples_in(tmp_path) == samples_in(original)


@pytest.mark.parametrize("piece_bytes", [1, 500, 10**9])
def test_any_range_is_streamed_as_it_is(original, monkeypatch, piece_bytes):
    monkeypatch.setattr(shard_blocks, "PIECE_BYTES", piece_bytes)
    manifest = Manifest.read(original)
    for start, stop in ((0, 100), (0, 1), (39, 41), (45, 47), (99, 100), (50, 50)):
        numbers = []
        for first, rows in stream(original, manifest, start, stop, fields=("number",)):
            assert first == rows["number"][0]
            numbers += rows["number"].tolist()
        assert numbers == list(range(start, stop))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_shares_cover_all_samples_and_are_cut_between_shards(size):
    class Rank:
        def __init__(self, rank):
            self.rank, self.size = rank, size

    for num_samples in (1, 10, 100):
        shares = [share(num_samples, Rank(rank), 7) for rank in range(size)]
        assert shares[0][0] == 0
        assert shares[-1][1] == num_samples
        for (_, stop), (start, _) in pairwise(shares):
            assert stop == start
            assert not stop % 7 or stop == num_samples


def test_a_damaged_block_stops_it_and_is_named(tmp_path):
    write_mixed(tmp_path / "set")
    shard = Manifest.read(tmp_path / "set").shards[1]
    flip(tmp_path / "set" / shard.file, shard.places["number"].offset + 8 * 7)
    with pytest.raises(
        CorruptError, match="block 1 of field number has the wrong crc32"
    ) as caught:
        reshard.reshard(tmp_path / "set", tmp_path / "out", Shape())
    assert caught.value.start <= 47 < 54 <= caught.value.stop


def test_a_data_set_is_never_replaced(original, tmp_path):
    before = files_of(original)
    for out in (original, tmp_path / "other"):
        write_mixed(tmp_path / "other", 5)
        with pytest.raises(DataError, match="holds one already; choose another"):
            reshard.reshard(original, out, Shape())
    assert files_of(original) == before


def test_what_was_broken_off_goes_on(original, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_blocks, "PIECE_BYTES", 1)
    append = ShardWriter.append

    def fail(writer, samples):
        if writer.num_written > 60:
            raise KeyError("killed")
        append(writer, samples)

    monkeypatch.setattr(ShardWriter, "append", fail)
    with pytest.raises(KeyError):
        reshard.reshard(original, tmp_path, Shape(samples_per_shard=20))
    seen = []

    def count(writer, samples):
        seen.extend(samples["number"].tolist())
        append(writer, samples)

    monkeypatch.setattr(ShardWriter, "append", count)
    reshard.reshard(original, tmp_path, Shape(samples_per_shard=20))
    assert seen == list(range(60, 100))
    assert samples_in(tmp_path) == samples_in(original)
    assert verify(tmp_path).leftovers == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples_per_shard": 0}, "samples_per_shard must be positive, got 0"),
        ({"block_size": -1}, "block_size must be positive, got -1"),
        ({"samples_per_shard": 1, "shard_bytes": 1}, "give one of them"),
        ({"compression": "gzip"}, "compression is zstd or none, got 'gzip'"),
    ],
)
def test_what_has_no_meaning_is_refused(options, words):
    with pytest.raises(DataError, match=words):
        Shape(**options)


@pytest.mark.ranks(2, 3)
def test_the_shards_are_the_same_for_any_number_of_ranks(
    world, comm, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(turns, "TURN_S", 0.0)  # as many turns as pieces
    monkeypatch.setattr(shard_blocks, "PIECE_BYTES", 1)
    directory = Path(world.bcast(str(tmp_path_factory.mktemp("shared"))))
    if world.rank == 0:
        write_mixed(directory / "set")
        write_mixed(directory / "bad")
        shard = Manifest.read(directory / "bad").shards[2]
        flip(directory / "bad" / shard.file, shard.places["number"].offset)
    world.Barrier()
    manifest = reshard.reshard(directory / "set", directory / "out", Shape(block_size=8), comm)
    assert numbers_in(directory / "out") == list(range(100))
    assert [shard.num_samples for shard in manifest.shards] == [40, 40, 20]
    assert verify(directory / "out", comm).is_whole
    with pytest.raises(DataError, match="block 0 of field number"):
        reshard.reshard(directory / "bad", directory / "none", Shape(), comm)
    with pytest.raises(DataError, match="holds one already"):
        reshard.reshard(directory / "set", directory / "out", Shape(), comm)
