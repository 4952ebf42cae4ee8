"""Check settings from the environment."""

import dataclasses
import math
from pathlib import Path

import pytest

from hpctrain.core import config
from hpctrain.core.config import Settings, unknown_variables
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB

CACHE_FOLDER = config.cache_folder  # tests use another folder


HERE = Path.cwd()


def test_an_empty_environment_gives_the_defaults():
    assert Settings.from_env({}) == Settings()


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("ranks_per_node", "2", 2), ("shared_memory", "memfd", "memfd"),
        ("overlap", "thread", "thread"), ("bucket_bytes", "1 MiB", MIB), ("timeout", "2.5", 2.5),
        ("timeout", "inf", math.inf), ("plan", "runs/a/plan.json", HERE / "runs/a/plan.json"),
        ("probe", "fresh", "fresh"), ("stats", "1", True), ("trace", "ON", True),
        ("trace", "no", False), ("trace", "", False), ("log_dir", "some", HERE / "some"),
        ("stage_dir", "/local", Path("/local")), ("log_level", "debug", "debug"),
        ("fusion_bytes", "4 MiB", 4 * MIB), ("fusion_bytes", "0", 0), ("cycle_s", "0.002", 0.002),
        ("cycle_s", "0", 0.0), ("stall_s", "inf", math.inf), ("stall_abort_s", "90", 90.0),
        ("timeline", "out/{rank}.json", HERE / "out/{rank}.json"),
        ("elastic_reset_limit", "0", 0),
    ],
)  # fmt: skip
def test_a_variable_is_read(setting, text, value):
    read = getattr(Settings.from_env({f"HPCTRAIN_{setting.upper()}": text}), setting)
    assert read == value
    assert type(read) is type(value)


WRONG = {
    "RANKS_PER_NODE": ("0", "two"), "OVERLAP": ("always",), "SHARED_MEMORY": ("yes",),
    "BUCKET_BYTES": ("many",), "TIMEOUT": ("0", "-1", "nan", "soon"), "PLAN": ("",),
    "LOG_DIR": ("",),
    "PROBE": ("always",), "STATS": ("often",), "TRACE": ("perhaps",), "LOG_LEVEL": ("loud",),
    "CYCLE_S": ("-1",), "STALL_S": ("0",), "TIMELINE": ("",), "ELASTIC_RESET_LIMIT": ("-1",),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, each) for n in WRONG for each in WRONG[n]])
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(name, value):
    with pytest.raises(ConfigError, match=f"HPCTRAIN_{name}") as caught:
        Settings.from_env({f"HPCTRAIN_{name}": value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "folder"),
    [
        ({"XDG_CACHE_HOME": "/a"}, "/a/hpctrain"),
        ({"XDG_CACHE_HOME": "a"}, "/home/me/.cache/hpctrain"),
        ({}, "/home/me/.cache/hpctrain"),
    ],
)
def test_the_cache_is_where_the_standard_says(monkeypatch, chosen, folder):
    monkeypatch.setenv("HOME", "/home/me")
    assert CACHE_FOLDER(chosen) == Path(folder)


def test_a_misspelt_variable_gets_a_hint():
    (text,) = unknown_variables({"HPCTRAIN_OVERLAPP": "end", "HOME": "/"})
    assert "HPCTRAIN_OVERLAPP" in text
    assert "did you mean HPCTRAIN_OVERLAP?" in text


def test_a_name_of_horovods_under_our_prefix_means_what_horovods_does():
    names = ("STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "FUSION_THRESHOLD")
    texts = unknown_variables({f"HPCTRAIN_{name}": "7" for name in names})
    ours = [text.rpartition(" mean ")[2] for text in texts]
    assert ours == [f"HPCTRAIN_{name}?" for name in ("FUSION_BYTES", "STALL_S", "STALL_ABORT_S")]


def test_variables_of_settings_and_of_required_features_are_known():
    known = [f"HPCTRAIN_{field.name.upper()}" for field in dataclasses.fields(Settings)]
    names = [*known, "HPCTRAIN_REQUIRE"]
    assert unknown_variables(dict.fromkeys(names, "")) == []
