"""A configuration as a commented TOML file, with every key."""

import textwrap

from hpctrain.train.config import RunConfig
from hpctrain.train.keys import all_keys, all_tables, value_of
from hpctrain.train.toml import dumps


def render(config: RunConfig | None = None) -> str:
    """Write ``config`` (the defaults when None) with the sentence of each key above it.

    Reading the text with ``load`` gives an equal configuration.
    """
    config = config or RunConfig()
    lines = []
    for table, summary in all_tables().items():
        lines += [f"[{table}]  # {summary}", ""] if table else [f"# {summary}", ""]
        for key in all_keys().values():
            if key.table == table:
                lines += textwrap.wrap(
                    key.sentence, width=97, initial_indent="# ", subsequent_indent="# "
                )
                lines += [f"{key.short} = {dumps(value_of(config, key.name))}", ""]
    return "\n".join(lines)
