"""Check a machine read from a file: its values, or its errors."""

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


def test_file_overrides_the_defaults(tmp_path):
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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "a machine must have nodes"),
        ("nodes = 0", "nodes must be at least 1, got 0"),
        ("nodes = 2.5", "nodes must be an integer, got 2.5"),
        ("nodes = true", "nodes must be an integer, got True"),
        ("nodes = 2\nmtbf_s = 0", "mtbf_s must be above 0, got 0"),
        ("nodes = 2\njitter = nan", "jitter must be at least 0, got nan"),
        ("nodes = 2\nslow_fraction = 1.5", "slow_fraction must be at most 1, got 1.5"),
        ("nodes = 2\nspeed = 3", "speed is not a key"),
        ("nodes = 2\nnode = 3", "node is a table"),
        ("nodes = 2\n[node]\nlatency_s = -1", "node.latency_s must be at least 0, got -1"),
        ("nodes =", "cannot be read as TOML"),
    ],
)
def test_wrong_values_raise_with_their_key(tmp_path, text, complaint):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Machine.read(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)


def test_arguments_of_a_program_are_checked():
    with pytest.raises(ConfigError, match="bytes_per_s must be above 0, got 0"):
        Link(1e-6, 0)
    with pytest.raises(ConfigError, match="oversubscription must be at least 1"):
        Machine(nodes=2, oversubscription=0.5)


def test_a_link_keeps_the_defaults_that_a_file_omits(tmp_path):
    (tmp_path / "machine.toml").write_text("nodes = 2\n[node]\nlatency_s = 5e-6")
    assert Machine.read(tmp_path / "machine.toml").node == Link(5e-6, 10e9)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        Machine.read(tmp_path / "absent.toml")
