"""Parts are disjoint and complete, as large as asked for, and the same everywhere."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.tools import blocks as shard_blocks
from hpctrain.data.tools.split import Group, parse_shares, sizes_of, split
from hpctrain.data.tools.verify import verify
from hpctrain.data.writer import write_arrays
from tests.data.mixed_set import numbers_in, samples_in, write_mixed

HALVES = parse_shares(["a=0.5", "b=0.5"])
USUAL = parse_shares(["train=0.8", "val=0.1", "test=0.1"])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original") / "set"
    write_mixed(directory, compression="zstd")
    (directory / "classes.txt").write_text("cat\ndog\nemu\n")
    return directory


@pytest.mark.parametrize("by", [None, "label"])
def test_parts_are_disjoint_complete_and_in_order(original, tmp_path, by):
    manifests = split(original, tmp_path, USUAL, by=by)
    parts = {name: samples_in(tmp_path / name) for name in USUAL}
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 80,
        "val": 10,
        "test": 10,
    }
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


def test_by_a_field_every_part_has_the_mixture_of_the_whole(original, tmp_path):
    split(original, tmp_path, USUAL, by="label")
    for name, share in USUAL.items():
        labels = Counter(sample["label"] for sample in samples_in(tmp_path / name))
        assert labels == {0: 50 * share, 1: 30 * share, 2: 20 * share}


def test_the_same_seed_gives_the_same_parts_and_another_one_others(original, tmp_path):
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        split(original, tmp_path / name, HALVES, seed=seed)
    first, again, other = (numbers_in(tmp_path / n / "a") for n in ("first", "again", "other"))
    assert first == again != other


@pytest.mark.parametrize("by", [None, "label"])
def test_pieces_and_shards_play_no_role(original, tmp_path, monkeypatch, by):
    split(original, tmp_path / "first", HALVES, by=by)
    monkeypatch.setattr(shard_blocks, "PIECE_BYTES", 1)
    write_mixed(tmp_path / "set", samples_per_shard=30)
    split(tmp_path / "set", tmp_path / "second", HALVES, by=by)
    assert numbers_in(tmp_path / "first/a") == numbers_in(tmp_path / "second/a")


SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(
    lambda weights: {str(i): Fraction(w, sum(weights)) for i, w in enumerate(weights)}
)


@settings(max_examples=100)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=30), shares=SHARES)
def test_every_group_and_the_whole_are_shared_out_as_asked_for(counts, shares):
    sizes = sizes_of(counts, shares)
    assert sizes.sum(1).tolist() == counts
    wanted = np.array([[float(count * share) for share in shares.values()] for count in counts])
    assert np.all(np.abs(sizes - wanted) < 1 + 1e-9)
    assert np.all(np.abs(sizes.sum(0) - wanted.sum(0)) < len(shares))


@pytest.mark.parametrize("count", [1, 10, 70_000])
def test_a_group_gives_each_part_its_number(count):
    sizes = sizes_of([count], USUAL)[0]
    parts = Group(sizes, 3, 0).part_of(np.arange(count))
    assert np.bincount(parts, minlength=3).tolist() == sizes.tolist()


def test_parts_are_drawn_at_random():
    # Of 2000 draws, a sample is in the small part 200 times; six deviations are 80.
    sizes = np.array([18, 2])
    hits = sum(Group(sizes, seed, 0).part_of(np.arange(20)) for seed in range(2000))
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
def test_shares_that_cannot_be_are_told(texts, words):
    with pytest.raises(DataError, match=words):
        parse_shares(texts)


def test_what_cannot_be_split_is_told_and_writes_nothing(original, tmp_path):
    for by, words in (
        ("nothing", "nothing is none of image"),
        ("image", r"image has shape \(3, 2\) and dtype <f4"),
        ("text", "ragged"),
    ):
        with pytest.raises(DataError, match=words):
            split(original, tmp_path, HALVES, by=by)
    tiny = parse_shares(["a=0.999", "b=0.001"])
    with pytest.raises(DataError, match="b gets none of 100; give it a larger share"):
        split(original, tmp_path, tiny)
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_is_never_replaced(original, tmp_path):
    write_mixed(tmp_path / "b", 5)
    with pytest.raises(DataError, match="holds one already"):
        split(original, tmp_path, HALVES)
    assert not list(tmp_path.glob("a/*"))


def test_negative_values_and_booleans_are_values_too(tmp_path):
    rows = {"x": np.arange(-10, 10).repeat(2), "flag": np.arange(40) % 2 == 1}
    write_arrays(tmp_path / "set", rows, samples_per_shard=7)
    split(tmp_path / "set", tmp_path / "by_x", HALVES, by="x")
    split(tmp_path / "set", tmp_path / "by_flag", HALVES, by="flag")
    assert [s["x"] for s in samples_in(tmp_path / "by_x/a")] == list(range(-10, 10))
    assert sum(s["flag"] for s in samples_in(tmp_path / "by_flag/b")) == 10


@pytest.mark.ranks(3)
def test_ranks_make_the_parts_that_one_makes(world, comm, tmp_path_factory):
    directory = Path(world.bcast(str(tmp_path_factory.mktemp("shared"))))
    if world.rank == 0:
        write_mixed(directory / "set")
        split(directory / "set", directory / "alone", USUAL, by="label")
    world.Barrier()
    split(directory / "set", directory / "all", USUAL, comm, by="label")
    for name in USUAL:
        assert samples_in(directory / "all" / name) == samples_in(directory / "alone" / name)
        assert verify(directory / "all" / name, comm).is_whole
    with pytest.raises(DataError, match="gets none"):
        split(directory / "set", directory / "no", parse_shares(["a=0.999", "b=0.001"]), comm)
