import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.train.explain import explain
from hpctrain.train.keys import all_keys, all_tables
from hpctrain.train.load import load


def test_a_key_is_explained_with_its_value_and_who_set_it():
    rows = dict(explain("optimizer.lr", load(None, ["optimizer.lr=0.1"])))
    assert rows["type"] == "a number"
    assert (rows["default"], rows["value"]) == ("0.05", "0.1")
    assert rows["set by"] == "argument --set optimizer.lr=0.1"
    assert rows["meaning"].startswith("Peak learning rate.")


def test_every_key_and_table_can_be_explained():
    for name in [*all_keys(), *all_tables()]:
        assert explain(name, load(None))


def test_an_unknown_key_is_answered_by_the_likely_one():
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.lr\?"):
        explain("optimiser.lr", load(None))
