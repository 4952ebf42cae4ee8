"""Configuration keys: descriptions, types and defaults, and TOML output that can be read back."""

import datetime
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.checks import TYPE_NAMES, alternatives, checked, value_of
from hpctrain.core.keys import dumps, keys_of, render, tables_of
from hpctrain.core.python_compat import tomllib
from hpctrain.train.load_config import load
from hpctrain.train.run_config import ModelConfig, RunConfig

KEYS = keys_of(RunConfig).values()


def test_every_key_has_a_sentence_a_toml_type_and_a_valid_default():
    texts = [key.sentence for key in KEYS] + list(tables_of(RunConfig).values())
    assert all(text.endswith((".", ")")) for text in texts), texts
    assert all(kind in TYPE_NAMES for key in KEYS for kind, _ in alternatives(key.hint))
    config = RunConfig()
    for key in KEYS:
        assert (
            checked(key.name, key.default, key.hint) == key.default == value_of(config, key.name)
        )
    assert set(tables_of(RunConfig)) == {key.table for key in KEYS}
    for name in [*keys_of(RunConfig), *tables_of(RunConfig)]:
        assert load(None).explain(name)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        replace(
            RunConfig(name="ä b", seed=7),
            model=ModelConfig(target="m:f", args={"sizes": [1, 2], "inner": {"a b": 'quote"'}}),
        ),
    ],
)
def test_a_written_configuration_is_read_back(tmp_path, config):
    path = tmp_path / "all.toml"
    path.write_text(render(config), encoding="utf-8")
    loaded = load(path)
    assert loaded.config == config
    assert set(loaded.origins) == set(keys_of(RunConfig))


def test_every_key_is_written_below_its_sentence():
    text = render(RunConfig())
    for key in KEYS:
        before, _, _ = text.partition(f"\n{key.short} = ")
        assert key.sentence.split()[-1] in text, key.name
        assert before != text
    assert max(map(len, text.splitlines())) <= 99


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXTS
    | st.dates()
    | st.just(datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.timezone.utc))
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@given(VALUES)
def test_written_values_are_read_back(value):
    assert tomllib.loads(f"value = {dumps(value)}") == {"value": value}


def test_values_without_toml_representation_are_rejected():
    with pytest.raises(TypeError, match="TOML has no value for None"):
        dumps(None)
