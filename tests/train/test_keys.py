from hpctrain.train.config import RunConfig
from hpctrain.train.keys import TYPE_NAMES, all_keys, all_tables, value_of


def test_every_key_and_table_has_a_sentence_that_ends():
    texts = [key.sentence for key in all_keys().values()] + list(all_tables().values())
    assert all(text.endswith((".", ")")) for text in texts), texts


def test_every_key_has_a_type_of_toml_and_a_default_of_that_type():
    for key in all_keys().values():
        assert key.type in TYPE_NAMES
        kinds = (key.type, int) if key.takes_number else key.type
        assert isinstance(key.default, kinds), key.name


def test_the_keys_cover_the_configuration():
    config = RunConfig()
    assert {key.name: value_of(config, key.name) for key in all_keys().values()} == {
        key.name: key.default for key in all_keys().values()
    }
    assert set(all_tables()) == {key.table for key in all_keys().values()}
