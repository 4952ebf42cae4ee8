"""A machine read from a file: its values, or what is wrong with them."""

import math

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.cost.machine import Link, Machine

TEXT = """
nodes = 64
ranks_per_node = 4
nics = 2
leaf_size = 8
oversubscription = 2
mtbf_s = inf

[network]
latency_s = 1e-6
bytes_per_s = 12.5e9
"""


def test_a_file_says_what_differs_from_the_defaults(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(TEXT)
    machine = Machine.read(path)
    assert machine == Machine(
        nodes=64,
        ranks_per_node=4,
        nics=2,
        leaf_size=8,
        oversubscription=2,
        network=Link(1e-6, 12.5e9),
    )
    assert machine.num_ranks == 256
    assert machine.leaf_bytes_per_s == 8 * 2 * 12.5e9 / 2
    assert Machine(nodes=1).leaf_bytes_per_s == math.inf


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "needs nodes; add nodes"),
        ("nodes = 0", "nodes of a machine must be 1 or more, got 0"),
        ("nodes = 2.5", "nodes is a whole number, got 2.5"),
        ("nodes = true", "nodes is a whole number, got True"),
        ("nodes = 2\nmtbf_s = 0", "mtbf_s of a machine must be more than 0, or inf, got 0"),
        ("nodes = 2\njitter = nan", "jitter of a machine must be 0 or more, got nan"),
        ("nodes = 2\nslow_fraction = 1.5", "slow_fraction of a machine must be from 0 to 1"),
        ("nodes = 2\nspeed = 3", "got speed"),
        ("nodes = 2\nnode = 3", "a link is a table with keys, got 3"),
        ("nodes = 2\n[node]\nlatency_s = 1e-6", "needs latency_s, bytes_per_s; add bytes_per_s"),
        ("nodes = 2\n[node]\nlatency_s = -1\nbytes_per_s = 1", "latency_s of a link must be"),
        ("nodes =", "cannot be read as the TOML of a machine"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, complaint):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Machine.read(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        Machine.read(tmp_path / "absent.toml")
