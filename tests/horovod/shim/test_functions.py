import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.horovod.shim import functions


def test_variables_are_set_in_a_block_and_put_back(monkeypatch):
    monkeypatch.setenv("SHIM_A", "before")
    monkeypatch.delenv("SHIM_B", raising=False)
    with functions.env(SHIM_A="1", SHIM_B="2", SHIM_C=None):
        assert (os.environ["SHIM_A"], os.environ["SHIM_B"]) == ("1", "2")
        assert "SHIM_C" not in os.environ
    assert os.environ["SHIM_A"] == "before"
    assert "SHIM_B" not in os.environ


@given(st.lists(st.integers()), st.integers(1, 9))
def test_parts_of_a_list_are_the_list_in_lengths_that_differ_by_one(values, num_parts):
    parts = functions.split_list(values, num_parts)
    lengths = [len(part) for part in parts]
    assert [value for part in parts for value in part] == values
    assert len(parts) == num_parts
    assert sorted(lengths, reverse=True) == lengths
    assert lengths[0] - lengths[-1] <= 1


def test_powers_of_two_are_these():
    found = [number for number in range(-1, 20) if functions.num_rank_is_power_2(number)]
    assert found == [1, 2, 4, 8, 16]


def test_what_can_be_iterated_over_is_iterable():
    assert functions.is_iterable([])
    assert functions.is_iterable("text")
    assert not functions.is_iterable(1)


def test_questions_about_the_build_take_horovods_argument():
    assert functions.mpi_built(verbose=True)
    assert functions.nccl_built(verbose=True) == 0
    assert not any(
        built(verbose=True)
        for built in (functions.gloo_built, functions.ddl_built, functions.ccl_built)
    )


@pytest.fixture
def asked(monkeypatch):
    """The numbers of ranks that were asked for; nothing is started."""
    found = []
    monkeypatch.setattr(functions, "hpctrain_run", lambda *_, np: found.append(np) or [None] * np)
    return found


def test_ranks_are_counted_by_either_name(asked):
    functions.run(print, num_proc=2)
    functions.run(print, np=3)
    functions.run(print)
    assert asked == [2, 3, 1]


def test_what_matters_on_other_hosts_only_is_taken(asked):
    functions.run(print, (), {}, 2, hosts="localhost:1,127.0.0.1:1", use_gloo=True, verbose=2)
    functions.run(print, network_interface="eth0", ssh_port=22, min_num_proc=None)
    assert asked == [2, 1]


def test_an_argument_that_asks_for_more_is_refused_by_name(asked):
    with pytest.raises(ConfigError, match="no max_num_proc, min_np; leave them out"):
        functions.run(print, min_np=1, max_num_proc=4)
    with pytest.raises(ConfigError, match=r"this host only, got a:2; .*--hosts a:2"):
        functions.run(print, np=2, hosts="a:2")
    with pytest.raises(LaunchError, match="3 ranks and 2 places"):
        functions.run(print, np=3, hosts="localhost:2")
    assert asked == []
