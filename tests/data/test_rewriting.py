"""Check that a rewritten data set has the same samples in order, and that splits are disjoint."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.tools import rank_work, rewriting
from hpctrain.data.tools.rewriting import (
    Shape,
    parse_shares,
    parts_drawn,
    reshard,
    share,
    sizes_of,
    split,
)
from hpctrain.data.tools.verify import verify
from hpctrain.data.writer import ShardWriter
from tests.data.mixed_set import files_of, flip, numbers_in, samples_in, shard, write_mixed

USUAL = parse_shares(["train=0.8", "val=0.1", "test=0.1"])
HALVES = parse_shares(["a=0.5", "b=0.5"])
TINY = parse_shares(["a=0.999", "b=0.001"])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original") / "set"
    write_mixed(directory)
    (directory / "classes.txt").write_text("cat\ndog\nemu\n")
    return directory


@pytest.mark.parametrize(
    ("per_shard", "block_size", "piece_bytes"), [(9, 1, 1), (64, 16, 500), (1000, 200, 10**9)]
)
def test_samples_and_order_do_not_depend_on_shards(
    original, tmp_path, monkeypatch, per_shard, block_size, piece_bytes
):
    monkeypatch.setattr(rewriting, "PIECE_BYTES", piece_bytes)
    shape = Shape(samples_per_shard=per_shard, block_size=block_size)
    manifest = reshard(original, tmp_path, shape)
    assert samples_in(tmp_path) == samples_in(original)
    assert manifest == Manifest.read(tmp_path)
    sizes = [one.num_samples for one in manifest.shards]
    assert sizes == [min(per_shard, 100 - start) for start in range(0, 100, per_shard)]
    assert (manifest.block_size, manifest.split) == (block_size, "train")
    assert (tmp_path / "classes.txt").read_text() == "cat\ndog\nemu\n"
    assert verify(tmp_path).is_whole


def test_omitted_options_are_kept(original, tmp_path):
    manifest, before = reshard(original, tmp_path, Shape()), Manifest.read(original)
    assert manifest.uuid != before.uuid
    wanted = replace(before, shards=(), classes=("cat", "dog", "emu"))  # from the file
    assert replace(manifest, uuid=before.uuid, shards=()) == wanted
    assert [one.num_samples for one in manifest.shards] == [40, 40, 20]


def test_compression_there_and_back_is_the_identity(original, tmp_path):
    reshard(original, tmp_path / "zstd", Shape(compression="zstd"))
    assert all(f.compression == "zstd" for f in Manifest.read(tmp_path / "zstd").fields.values())
    reshard(tmp_path / "zstd", tmp_path / "none", Shape(compression="none"))
    assert Manifest.read(tmp_path / "none").fields == Manifest.read(original).fields
    assert samples_in(tmp_path / "zstd") == samples_in(tmp_path / "none") == samples_in(original)


def test_a_size_in_bytes_makes_shards_of_whole_blocks_of_about_that_size(original, tmp_path):
    mean = Manifest.read(original).sample_bytes
    assert mean == (100 * (24 + 8 + 1) + 4 * 200 + 16 * 99) / 100
    manifest = reshard(original, tmp_path, Shape(shard_bytes=round(mean * 30)))
    assert [one.num_samples for one in manifest.shards] == [28, 28, 28, 16]


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
    path, found = shard(tmp_path / "set")
    flip(path, found.places["number"].offset + 8 * 7)
    words = "block 1 of field number has .*samples 47 to 53"
    with pytest.raises(CorruptError, match=words) as caught:
        reshard(tmp_path / "set", tmp_path / "out", Shape())
    assert caught.value.start <= 47 < 54 <= caught.value.stop


def test_a_data_set_is_never_replaced(original, tmp_path):
    before = files_of(original)
    write_mixed(tmp_path / "b", 5)
    for out in (original, tmp_path / "b"):
        with pytest.raises(DataError, match="already contains a data set; choose another"):
            reshard(original, out, Shape())
    with pytest.raises(DataError, match="already contains a data set"):
        split(original, tmp_path, HALVES)
    assert files_of(original) == before
    assert not list(tmp_path.glob("a/*"))


def test_interrupted_rewriting_resumes(original, tmp_path, monkeypatch):
    monkeypatch.setattr(rewriting, "PIECE_BYTES", 1)
    append, seen = ShardWriter.append, []

    def fail(writer, samples):
        if writer.num_written > 60:
            raise KeyError("killed")
        append(writer, samples)

    def count(writer, samples):
        seen.extend(samples["number"].tolist())
        append(writer, samples)

    monkeypatch.setattr(ShardWriter, "append", fail)
    with pytest.raises(KeyError):
        reshard(original, tmp_path, Shape(samples_per_shard=20))
    monkeypatch.setattr(ShardWriter, "append", count)
    reshard(original, tmp_path, Shape(samples_per_shard=20))
    assert seen == list(range(60, 100))
    assert samples_in(tmp_path) == samples_in(original)
    assert verify(tmp_path).leftovers == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples_per_shard": 0}, "samples_per_shard must be at least 1, got 0"),
        ({"block_size": -1}, "block_size must be at least 1, got -1"),
        ({"samples_per_shard": 1, "shard_bytes": 1}, "omit one"),
        ({"compression": "gzip"}, "compression must be one of none, zstd, got 'gzip'"),
    ],
)
def test_a_shape_without_a_meaning_is_refused(options, words):
    with pytest.raises(DataError, match=words):
        Shape(**options)


def test_parts_are_disjoint_complete_and_in_order(original, tmp_path):
    manifests = split(original, tmp_path, USUAL)
    parts = {name: samples_in(tmp_path / name) for name in USUAL}
    assert [len(part) for part in parts.values()] == [80, 10, 10]
    together = sorted((s for part in parts.values() for s in part), key=lambda s: s["number"])
    assert together == samples_in(original)
    for name, part in parts.items():
        numbers = [sample["number"] for sample in part]
        assert numbers == sorted(numbers)
        assert manifests[name] == Manifest.read(tmp_path / name)
        assert manifests[name].split == name
        assert manifests[name].fields == Manifest.read(original).fields
        assert (tmp_path / name / "classes.txt").exists()
        assert verify(tmp_path / name).is_whole


def test_parts_depend_on_the_seed_and_neither_on_pieces_nor_on_shards(
    original, tmp_path, monkeypatch
):
    split(original, tmp_path / "first", HALVES)
    monkeypatch.setattr(rewriting, "PIECE_BYTES", 1)
    write_mixed(tmp_path / "set", samples_per_shard=30, compression="zstd")
    split(tmp_path / "set", tmp_path / "again", HALVES)
    split(original, tmp_path / "other", HALVES, seed=1)
    first, again, other = (numbers_in(tmp_path / n / "a") for n in ("first", "again", "other"))
    assert first == again != other
    assert first[:12] == [
        1,
        9,
        10,
        12,
        16,
        17,
        19,
        20,
        21,
        22,
        26,
        27,
    ]  # this order must not change


@pytest.mark.parametrize("count", [10, 11, 13, 70_000])
def test_parts_have_their_share_and_are_drawn_to_be_of_that_size(count):
    sizes = sizes_of(count, USUAL)
    assert sum(sizes) == count
    for size, part in zip(sizes, USUAL.values(), strict=True):
        assert abs(size - count * part) < 1
    assert np.bincount(parts_drawn(sizes, 3)(np.arange(count))).tolist() == sizes


def test_parts_are_drawn_at_random():
    # In 2000 draws, a sample is in the small part 200 times; six deviations are 80.
    hits = sum(parts_drawn([18, 2], seed)(np.arange(20)) for seed in range(2000))
    assert np.all(np.abs(hits - 200) < 80)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a=0.5", "b=0.4"], "0.5 .* sum to 0.9"),
        (["a=0.5", "a=0.5"], "got a twice"),
        (["a"], "such as train=0.9, got 'a'"),
        (["a=x"], "got 'a=x'"),
        (["a=1", "b=0"], "got 'b=0'"),
        (["../a=1"], r"got '\.\./a=1'"),
    ],
)
def test_invalid_shares_raise(texts, words):
    with pytest.raises(DataError, match=words):
        parse_shares(texts)


@pytest.mark.ranks(1, 2, 3)
def test_any_number_of_ranks_writes_the_same_and_all_raise_an_error_of_one(
    world, comm, tmp_path_factory, monkeypatch
):
    monkeypatch.setattr(rank_work, "TURN_S", 0.0)  # as many turns as pieces
    monkeypatch.setattr(rewriting, "PIECE_BYTES", 1)
    directory = Path(world.bcast(str(tmp_path_factory.mktemp("shared"))))
    source, bad = directory / "set", directory / "bad"
    if world.rank == 0:
        write_mixed(source)
        write_mixed(bad)
        path, found = shard(bad, 2)
        flip(path, found.places["number"].offset)
        split(source, directory / "alone", USUAL)
    world.Barrier()
    manifest = reshard(source, directory / "out", Shape(block_size=8), comm)
    assert numbers_in(directory / "out") == list(range(100))
    assert [one.num_samples for one in manifest.shards] == [40, 40, 20]
    assert verify(directory / "out", comm).is_whole
    split(source, directory / "all", USUAL, comm)
    for name in USUAL:
        assert samples_in(directory / "all" / name) == samples_in(directory / "alone" / name)
        assert verify(directory / "all" / name, comm).is_whole
    for work, words in (
        (lambda: reshard(bad, directory / "none", Shape(), comm), "block 0 of field number"),
        (lambda: reshard(source, directory / "out", Shape(), comm), "already contains a data set"),
        (
            lambda: split(source, directory / "no", TINY, comm),
            "b gets none of 100 samples; give it",
        ),
    ):
        with pytest.raises(DataError, match=words):
            work()
    assert not (directory / "no").exists()
