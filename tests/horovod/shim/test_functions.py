"""The call of ``hpctrain.run`` that ``horovod.run`` makes, and rejected arguments."""

import os

import pytest

from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.horovod.shim import functions


@pytest.fixture
def asked(monkeypatch):
    """The numbers of ranks passed to ``hpctrain.run``, which starts nothing."""
    found = []
    monkeypatch.setattr(functions, "hpctrain_run", lambda *_, np: found.append(np) or [None] * np)
    return found


def test_both_names_of_the_number_of_ranks_and_remote_options_are_accepted(asked):
    functions.run(print, num_proc=2)
    functions.run(print, np=3)
    functions.run(print, start_timeout=9, ssh_port=22, min_num_proc=None)
    functions.run(print, (), {}, 2, hosts="localhost:1,127.0.0.1:1", use_gloo=True, verbose=2)
    assert asked == [2, 3, 1, 2]


def test_unsupported_arguments_are_rejected_by_name(asked):
    with pytest.raises(ConfigError, match="got max_num_proc, min_np; leave them out"):
        functions.run(print, min_np=1, max_num_proc=4)
    with pytest.raises(ConfigError, match=r"this host only, got a:2; .*--hosts a:2"):
        functions.run(print, np=2, hosts="a:2")
    with pytest.raises(LaunchError, match="got 3 ranks and 2 slots"):
        functions.run(print, np=3, hosts="localhost:2")
    assert asked == []


def test_env_restores_the_environment_after_the_block(monkeypatch):
    monkeypatch.setenv("OLD", "old")
    with functions.env(OLD="new", NEW="1", NOT=None):
        assert (os.environ["OLD"], os.environ["NEW"], "NOT" in os.environ) == ("new", "1", False)
    assert (os.environ["OLD"], "NEW" in os.environ) == ("old", False)
