"""Samples of different lengths keep their values, whatever form they take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import DataError
from hpctrain.data.samples import Ragged

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def samples(lengths, *shape):
    return [torch.full((length, *shape), float(i)) for i, length in enumerate(lengths)]


@given(LENGTHS)
def test_samples_are_where_they_were_put(lengths):
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
    """Offsets need not begin at 0, nor end at the end of the values."""
    whole = Ragged.of(samples([2, 3, 0, 1]))
    part = Ragged(whole.values, whole.offsets[1:4])
    assert torch.equal(part.padded(), whole.padded()[1:3])


def test_what_is_not_there_or_too_long_is_told():
    with pytest.raises(DataError, match="padded to 2, but one has 3"):
        Ragged.of(samples([1, 3])).padded(length=2)
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"2 samples, got index {index}"):
            Ragged.of(samples([1, 3]))[index]


def test_samples_move_as_they_are():
    ragged = Ragged.of(samples([1, 3]))
    moved = ragged.to("meta")
    assert (moved.values.device.type, moved.offsets.device.type) == ("meta", "meta")
    assert torch.equal(ragged.to("cpu").values, ragged.values)
