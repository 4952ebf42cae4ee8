from dataclasses import replace

from hpctrain.train.config import ModelConfig, RunConfig
from hpctrain.train.keys import all_keys
from hpctrain.train.load import load
from hpctrain.train.template import render


def test_the_template_loads_and_equals_the_defaults(tmp_path):
    path = tmp_path / "all.toml"
    path.write_text(render(), encoding="utf-8")
    loaded = load(path)
    assert loaded.config == RunConfig()
    assert set(loaded.origins) == set(all_keys())


def test_a_configuration_survives_being_written(tmp_path):
    config = replace(
        RunConfig(name="ä b", seed=7),
        model=ModelConfig(target="m:f", args={"sizes": [1, 2], "inner": {"a b": 'quote"'}}),
    )
    path = tmp_path / "all.toml"
    path.write_text(render(config), encoding="utf-8")
    assert load(path).config == config


def test_every_key_stands_below_its_sentence():
    text = render()
    for key in all_keys().values():
        before, _, _ = text.partition(f"\n{key.short} = ")
        assert key.sentence.split()[-1] in text, key.name
        assert before != text
    assert max(map(len, text.splitlines())) <= 99
