"""Laws of what stays: the newest whole one always, the best as wished, damaged ones for a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.checkpoint_directory import Kept, expendable, name_of, step_of
from hpctrain.core.errors import ConfigError

SCORES = st.none() | st.floats(0, 1) | st.just(math.nan)
PRESENT = st.lists(
    st.builds(Kept, step=st.integers(0, 50), whole=st.booleans(), score=SCORES),
    unique_by=lambda kept: kept.step,
)


@given(PRESENT, st.integers(1, 5), st.integers(0, 4))
def test_the_last_and_the_best_whole_ones_stay(present, keep, keep_best):
    gone = expendable(present, keep=keep, keep_best=keep_best)
    whole = sorted((k for k in present if k.whole), key=lambda k: k.step)
    scored = [k for k in whole if k.score is not None and not math.isnan(k.score)]
    best = sorted(scored, key=lambda k: (-k.score, -k.step))[:keep_best]
    staying = {k.step for k in whole[-keep:] + best}
    assert not staying & {*gone}
    assert {k.step for k in whole} - {*gone} == staying
    assert gone == sorted(gone)


@given(PRESENT, st.integers(1, 5))
def test_a_damaged_one_goes_only_when_enough_whole_ones_are_newer(present, keep):
    gone = expendable(present, keep=keep)
    for kept in present:
        newer = sum(other.whole and other.step > kept.step for other in present)
        if not kept.whole:
            assert (kept.step in gone) == (newer >= keep)


@pytest.mark.parametrize(("keep", "keep_best"), [(0, 0), (-1, 2), (1, -1)])
def test_keeping_nothing_is_refused(keep, keep_best):
    with pytest.raises(ConfigError, match="at least the last"):
        expendable([], keep=keep, keep_best=keep_best)


@given(st.integers(0, 10**12))
def test_names_are_read_back(step):
    assert step_of(name_of(step)) == step


@pytest.mark.parametrize(
    "ending", ["1", "00000001.part", "00000001.aside", "000000001", "0000000a"]
)
def test_other_names_are_no_checkpoints(ending):
    assert step_of(f"step-{ending}") is None


def test_names_sort_as_their_steps():
    assert sorted(map(name_of, (100, 7, 99_999_999))) == [*map(name_of, (7, 100, 99_999_999))]
