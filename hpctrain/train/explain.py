"""Explanation of a configuration key: its meaning, value and source."""

from hpctrain.core.errors import ConfigError
from hpctrain.train.keys import all_keys, all_tables, value_of
from hpctrain.train.load import LoadedData, unknown_key
from hpctrain.train.toml import dumps


def explain(name: str, loaded: LoadedData) -> list[tuple[str, str]]:
    """Rows about one key, or one row per key of a table.

    Raises:
        ConfigError: ``name`` is neither a key nor a table.
    """
    keys = all_keys()
    if name in all_tables():
        return [(key.name, key.sentence) for key in keys.values() if key.table == name]
    if name not in keys:
        raise ConfigError(unknown_key(name))
    key = keys[name]
    return [
        ("key", key.name),
        ("meaning", key.sentence),
        ("type", key.type_name),
        ("default", dumps(key.default)),
        ("value", dumps(value_of(loaded.config, name))),
        ("set by", loaded.origin(name)),
    ]
