"""Laws of the settings that come from the environment."""

import dataclasses
import math
from pathlib import Path

import pytest

from hpctrain.core import config
from hpctrain.core.config import Settings, scratch_folders, unknown_variables
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import MIB

CACHE_FOLDER = config.cache_folder  # tests themselves have another


def test_an_empty_environment_gives_the_defaults():
    assert Settings.from_env({}) == Settings()


def test_every_variable_is_read():
    environ = {
        "HPCTRAIN_RANKS_PER_NODE": "2",
        "HPCTRAIN_SHARED_MEMORY": "memfd",
        "HPCTRAIN_OVERLAP": "thread",
        "HPCTRAIN_BUCKET_BYTES": "1 MiB",
        "HPCTRAIN_TIMEOUT": "2.5",
        "HPCTRAIN_PLAN": "runs/a/plan.json",
        "HPCTRAIN_PROBE": "fresh",
        "HPCTRAIN_STATS": "1",
        "HPCTRAIN_TRACE": "1",
        "HPCTRAIN_LOG_DIR": "some/where",
        "HPCTRAIN_STAGE_DIR": "/local",
        "HPCTRAIN_LOG_LEVEL": "debug",
        "HPCTRAIN_FUSION_BYTES": "4 MiB",
        "HPCTRAIN_CYCLE_S": "0.002",
        "HPCTRAIN_STALL_S": "inf",
        "HPCTRAIN_STALL_ABORT_S": "90",
        "HPCTRAIN_TIMELINE": "out/{rank}.json",
        "HPCTRAIN_TIMELINE_MARK_CYCLES": "1",
        "HPCTRAIN_ELASTIC_RESET_LIMIT": "0",
    }
    read = dataclasses.asdict(Settings.from_env(environ))
    expected = {
        "ranks_per_node": 2,
        "shared_memory": "memfd",
        "overlap": "thread",
        "bucket_bytes": MIB,
        "timeout": 2.5,
        "plan": Path("runs/a/plan.json"),
        "probe": "fresh",
        "stats": True,
        "trace": True,
        "log_dir": Path("some/where"),
        "stage_dir": Path("/local"),
        "log_level": "debug",
        "fusion_bytes": 4 * MIB,
        "cycle_s": 0.002,
        "stall_s": math.inf,
        "stall_abort_s": 90.0,
        "timeline": Path("out/{rank}.json"),
        "timeline_mark_cycles": True,
        "elastic_reset_limit": 0,
    }
    assert {name: read[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HPCTRAIN_RANKS_PER_NODE", "0"),
        ("HPCTRAIN_RANKS_PER_NODE", "two"),
        ("HPCTRAIN_OVERLAP", "always"),
        ("HPCTRAIN_SHARED_MEMORY", "yes"),
        ("HPCTRAIN_BUCKET_BYTES", "many"),
        ("HPCTRAIN_TIMEOUT", "0"),
        ("HPCTRAIN_TIMEOUT", "-1"),
        ("HPCTRAIN_TIMEOUT", "nan"),
        ("HPCTRAIN_TIMEOUT", "soon"),
        ("HPCTRAIN_PLAN", ""),
        ("HPCTRAIN_PROBE", "always"),
        ("HPCTRAIN_STATS", "often"),
        ("HPCTRAIN_TRACE", "perhaps"),
        ("HPCTRAIN_LOG_LEVEL", "loud"),
        ("HPCTRAIN_CYCLE_S", "-1"),
        ("HPCTRAIN_STALL_S", "0"),
        ("HPCTRAIN_TIMELINE", ""),
        ("HPCTRAIN_ELASTIC_RESET_LIMIT", "-1"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        Settings.from_env({name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("ON", True), ("0", False), ("no", False), ("", False)]
)
def test_switches_have_several_spellings(text, value):
    assert Settings.from_env({"HPCTRAIN_TRACE": text}).trace is value


def test_named_operations_may_travel_each_by_itself_and_at_once():
    read = Settings.from_env({"HPCTRAIN_FUSION_BYTES": "0", "HPCTRAIN_CYCLE_S": "0"})
    assert (read.fusion_bytes, read.cycle_s) == (0, 0.0)


def test_a_wait_may_last_for_ever():
    assert Settings.from_env({"HPCTRAIN_TIMEOUT": "inf"}).timeout == math.inf


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


def test_the_jobs_folders_for_temporary_files_are_slurms_and_then_the_standards():
    environ = {"TMPDIR": "/tmp/7", "SLURM_TMPDIR": "/local/7", "HOME": "/"}
    assert scratch_folders(environ) == [Path("/local/7"), Path("/tmp/7")]
    assert scratch_folders({"TMPDIR": ""}) == []


def test_a_misspelt_variable_gets_a_hint():
    (text,) = unknown_variables({"HPCTRAIN_OVERLAPP": "end", "HOME": "/"})
    assert "HPCTRAIN_OVERLAPP" in text
    assert "did you mean HPCTRAIN_OVERLAP?" in text


def test_variables_of_settings_and_of_the_test_suite_are_known():
    known = [f"HPCTRAIN_{field.name.upper()}" for field in dataclasses.fields(Settings)]
    names = [*known, "HPCTRAIN_REQUIRE", "HPCTRAIN_TEST_HANG_S"]
    assert unknown_variables(dict.fromkeys(names, "")) == []
