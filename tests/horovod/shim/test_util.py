import os

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.horovod.shim import util


def test_variables_are_set_in_a_block_and_put_back(monkeypatch):
    monkeypatch.setenv("SHIM_A", "before")
    monkeypatch.delenv("SHIM_B", raising=False)
    with util.env(SHIM_A="1", SHIM_B="2", SHIM_C=None):
        assert (os.environ["SHIM_A"], os.environ["SHIM_B"]) == ("1", "2")
        assert "SHIM_C" not in os.environ
    assert os.environ["SHIM_A"] == "before"
    assert "SHIM_B" not in os.environ


@given(st.lists(st.integers()), st.integers(1, 9))
def test_parts_of_a_list_are_the_list_in_lengths_that_differ_by_one(values, num_parts):
    parts = util.split_list(values, num_parts)
    lengths = [len(part) for part in parts]
    assert [value for part in parts for value in part] == values
    assert len(parts) == num_parts
    assert sorted(lengths, reverse=True) == lengths
    assert lengths[0] - lengths[-1] <= 1


def test_powers_of_two_are_these():
    found = [number for number in range(-1, 20) if util.num_rank_is_power_2(number)]
    assert found == [1, 2, 4, 8, 16]


def test_what_can_be_iterated_over_is_iterable():
    assert util.is_iterable([])
    assert util.is_iterable("text")
    assert not util.is_iterable(1)


def test_questions_about_the_build_take_horovods_argument():
    assert util.mpi_built(verbose=True)
    assert util.nccl_built(verbose=True) == 0
    assert not any(
        built(verbose=True) for built in (util.gloo_built, util.ddl_built, util.ccl_built)
    )
