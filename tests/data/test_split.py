"""Check splits by label: every sample in one part, different labels in each part."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hpctrain.core.errors import DataError
from hpctrain.data.data_split import Split
from hpctrain.data.loader import Loader
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import collate
from hpctrain.data.tools import label_split
from hpctrain.data.tools.label_split import LabelShares, parts_by_label, split_by_label
from hpctrain.data.writer import write_arrays
from tests.data.memory import InMemory, numbers

NUM_SAMPLES, NUM_LABELS = 300, 6
LABELS = np.arange(NUM_SAMPLES) * 7 % NUM_LABELS - 2


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("labelled") / "set"
    values = {"x": np.arange(2.0 * NUM_SAMPLES).reshape(-1, 2), "y": LABELS}
    write_arrays(directory, values | {"late": LABELS[:, None] + 5}, samples_per_shard=70)
    return directory


def some_split(num_samples: int, num_parts: int, seed: int = 0) -> Split:
    parts = np.random.default_rng(seed).integers(0, num_parts, num_samples).astype(np.uint32)
    parts[:num_parts] = np.arange(num_parts)
    return Split(f"memory of {num_samples}", parts, num_parts)


@given(
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e5, 1e300, float("inf")]),
    num_parts=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_all_samples_have_parts_which_differ_the_more_the_smaller_alpha_is(alpha, num_parts, seed):
    parts = parts_by_label(LABELS, num_parts, alpha, seed)
    assert parts.shape == LABELS.shape
    assert np.array_equal(parts, parts_by_label(LABELS, num_parts, alpha, seed))
    shares = [
        np.bincount(parts[label == LABELS], minlength=num_parts) for label in set(LABELS.tolist())
    ]
    assert parts.max() < num_parts
    equal = NUM_SAMPLES / NUM_LABELS / num_parts
    if alpha > 1e6:
        assert np.abs(np.array(shares) - equal).max() < 1
    if alpha == 1e-3:  # with few exceptions, a label is in one part
        assert np.mean([np.max(share) for share in shares]) > 0.9 * NUM_SAMPLES / NUM_LABELS
    others = parts_by_label(LABELS, num_parts, alpha, seed + 1)
    assert alpha < 0.1 or num_parts == 1 or not np.array_equal(parts, others)


@pytest.mark.ranks(1, 2, 3)
def test_a_file_is_the_same_for_any_number_of_ranks_and_has_what_the_table_says(
    comm, original, tmp_path, monkeypatch
):
    monkeypatch.setattr(label_split, "_PIECE", 16)
    original, out = comm.broadcast_object(original), comm.broadcast_object(tmp_path / "c.npz")
    output: list[int] = []
    found = split_by_label(
        original,
        out,
        LabelShares(num_parts=5, alpha=0.3, seed=4),
        comm,
        start=lambda _: output.append,
    )
    assert sum(comm.allgather_object(sum(output))) == NUM_SAMPLES == sum(found.split.sizes)
    assert np.array_equal(found.split.parts, parts_by_label(LABELS, 5, 0.3, 4))
    assert found.labels.tolist() == [-2, -1, 0, 1, 2, 3]
    for (part, column), count in np.ndenumerate(found.counts):
        assert count == np.sum((found.split.parts == part) & (found.labels[column] == LABELS))
    again = Split.read(out)
    dataset = ShardedDataset.open(original, comm)
    for rank in range(3):
        mine = again.subset(dataset, rank, 3)
        own = np.isin(again.parts, again.parts_of(rank, 3))
        assert np.array_equal(mine.take(np.arange(len(mine)))["y"], LABELS[own])
        for how in ({"collate_fn": collate}, {}):
            batches = [batch["y"] for batch in DataLoader(mine, batch_size=7, **how)]
            assert np.array_equal(torch.cat(batches), LABELS[own])
        assert mine[-1]["y"] == LABELS[own][-1]
        with pytest.raises(IndexError, match="an index must be from"):
            mine[len(mine)]
    with pytest.raises(DataError, match="the file of a split must not exist, but"):
        split_by_label(original, out, LabelShares(num_parts=5, alpha=0.3), comm)
    other = out.with_name("late.npz")
    late = LabelShares(num_parts=5, alpha=0.3, label="late")
    assert split_by_label(original, other, late, comm).labels[0] == 3


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_parts": 0}, "num_parts must be at least 1"),
        ({"num_parts": 2, "alpha": 0.0}, "ALPHA must be above 0, got 0"),
        ({"num_parts": 2, "alpha": float("nan")}, "got nan"),
        (
            {"num_parts": 90, "alpha": 0.01},
            r"parts \d+, .* would have none of the 300 samples; use fewer",
        ),
        ({"num_parts": 301, "alpha": float("inf")}, "would have none of"),
        ({"num_parts": 2, "label": "x"}, "got 'x', and the fields are x <f8"),
        ({"num_parts": 2, "label": "z"}, "--label must name a field"),
    ],
)
def test_an_invalid_split_is_rejected_on_every_rank_and_leaves_no_file(
    comm, original, tmp_path, options, message
):
    original, out = comm.broadcast_object(original), comm.broadcast_object(tmp_path / "c.npz")
    with pytest.raises(DataError, match=message):
        split_by_label(original, out, LabelShares(**{"alpha": 1.0, **options}), comm)
    comm.barrier()
    assert list(out.parent.iterdir()) == []


def test_a_file_that_is_damaged_or_of_other_data_is_refused(original, tmp_path):
    path = tmp_path / "c.npz"
    with pytest.raises(DataError, match="No such file"):
        Split.read(path)
    split_by_label(original, path, LabelShares(num_parts=3, alpha=1.0))
    whole = path.read_bytes()
    for damaged in (b"", whole[:200], whole[:700] + b"\xff" + whole[701:], b"parts"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="must be an undamaged file of"):
            Split.read(path)
    path.write_bytes(whole)
    for call in (Split.read(path).check, lambda data: Split.read(path).subset(data, 0, 1)):
        with pytest.raises(DataError, match="must belong to the data set, but it was written for"):
            call(InMemory(NUM_SAMPLES))
    loader = {"global_batch": 9, "split": path}
    with pytest.raises(DataError, match="must belong to the data set"):
        Loader(InMemory(NUM_SAMPLES), **loader)
    dataset = ShardedDataset(original)
    with pytest.raises(DataError, match="got 3 parts and 4 ranks"):
        Loader(dataset, **loader, size=4)
    with pytest.raises(DataError, match="omit one"):
        Loader(dataset, **loader, micro_shards=2)
    for wrong, message in (
        (
            np.zeros(3, np.uint32),
            "part 1 would have none of the 3 samples; use fewer parts",
        ),
        (np.full(3, 7, np.uint32), r"parts of a split must be in \[0, num_parts\), got part 7"),
        (np.zeros(3), "with the part of each sample"),
        ([0, 1], "got list"),
    ):
        with pytest.raises(DataError, match=message):
            Split("", wrong, 2)
    for rank in (-1, 3):
        with pytest.raises(DataError, match=rf"in \[0, size\), got rank {rank} of 3"):
            Split.read(path).parts_of(rank, 3)
    assert Split.read(path).num_parts == 3
    with pytest.raises(DataError, match="a Split or the path of its file, got 7"):
        Loader(dataset, global_batch=9, split=7)


@given(
    n=st.sampled_from([40, 97, 200]),
    num_parts=st.integers(5, 12),
    size=st.integers(1, 5),
    batch=st.sampled_from([1, 8, 30, 120, 250]),
    order=st.sampled_from(["global", "sequential", "window"]),
)
@settings(max_examples=30)
def test_ranks_read_their_parts_in_proportion_in_the_same_steps_for_any_number_of_them(
    n, num_parts, size, batch, order
):
    split = some_split(n, num_parts)

    def steps_of(size: int) -> list[tuple[list[int], ...]]:
        how = {"global_batch": batch, "order": order, "split": split, "size": size}
        loaders = [Loader(InMemory(n), rank=rank, **how) for rank in range(size)]
        for loader in loaders:
            loader.set_epoch(2)
        return list(zip(*map(numbers, loaders), strict=True))

    found = steps_of(size)
    assert sorted(chain.from_iterable(some for step in found for some in step)) == list(range(n))
    for step, (whole,) in zip(found, steps_of(1), strict=True):
        assert sorted(chain.from_iterable(step)) == sorted(whole)
        for rank, mine in enumerate(step):
            own = split.parts_of(rank, size)
            assert all(split.parts[sample] in own for sample in mine)
            in_proportion = len(whole) * sum(split.sizes[own.start : own.stop]) / n
            assert abs(len(mine) - in_proportion) < 2 + num_parts


def test_a_loader_resumes_with_its_split_only_on_another_number_of_ranks():
    split = some_split(97, 6)
    options = {"global_batch": 10, "seed": 3}
    loader = Loader(InMemory(97), split=split, **options)
    steps = iter(loader)
    seen = [sample for _ in range(4) for sample in next(steps).number.tolist()]
    state = loader.state_dict()
    rest = []
    for rank in range(3):
        again = Loader(InMemory(97), split=split, rank=rank, size=3, **options)
        again.load_state_dict(state)
        rest += chain.from_iterable(numbers(again))
    assert sorted(seen + rest) == list(range(97))
    for other in (None, some_split(97, 6, 1)):
        with pytest.raises(DataError, match="continue with the split of its state"):
            Loader(InMemory(97), split=other, **options).load_state_dict(state)


@pytest.mark.ranks(2, 3)
def test_another_split_on_one_rank_is_an_error_on_all(comm):
    split = some_split(97, 6, 1 if comm.rank else 0)
    with pytest.raises(DataError, match="all ranks must load the same samples"):
        next(iter(Loader(InMemory(97), global_batch=10, comm=comm, split=split)))
