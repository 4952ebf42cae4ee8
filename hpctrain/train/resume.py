"""Whether a run goes on where an earlier one stopped, and whether it is the same run."""

from pathlib import Path
from typing import Any

from hpctrain.cluster import env
from hpctrain.comm import plan_file
from hpctrain.errors import ConfigError
from hpctrain.train.config import RunConfig
from hpctrain.train.keys import all_keys, value_of
from hpctrain.train.load import load
from hpctrain.train.metrics import read
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.toml import dumps

_MATHEMATICS = ("model", "data", "loss", "optimizer", "schedule", "train")
"""Tables whose keys decide what is learnt."""
_NOT_MATHEMATICS = ("data.workers", "data.prefetch", "data.stage")


def goes_on(config: RunConfig, directory: RunDirectory, *, asked: bool) -> bool:
    """Say whether there is a run to go on with, and that is wanted.

    Args:
        config: of this part.
        directory: of the run.
        asked: whether it must go on: ``--resume``.

    Raises:
        ConfigError: it must, and there is none.
    """
    if asked and not directory.is_used():
        raise ConfigError(
            f"--resume goes on with a run, and {directory.path} holds none; leave --resume out "
            f"to begin one, or name its folder with --set output_dir=…"
        )
    return directory.is_used() and (asked or config.checkpoint.resume == "auto")


def finished(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the last record of a run that has reached its end; None of any other."""
    records = read(directory.metrics) if directory.metrics.exists() else []
    return records[-1] if records and records[-1]["event"] == "finished" else None


def check_same(directory: RunDirectory, config: RunConfig, *, force: bool) -> list[str]:
    """Return what the configuration changes in the run, a line for each key.

    Raises:
        ConfigError: a change would make it another training, and ``force`` is not set.
    """
    before = load(directory.config).config
    changed = {
        name: f"{name} was {dumps(value_of(before, name))}, is {dumps(value_of(config, name))}"
        for name in all_keys()
        if name != "output_dir" and value_of(before, name) != value_of(config, name)
    }
    other = [line for name, line in changed.items() if _is_mathematics(name)]
    if other and not force:
        raise ConfigError(
            f"a run goes on as the training it was, and {directory.config} says: "
            f"{'; '.join(other)}; set them back, choose another output_dir, or add --force"
        )
    return list(changed.values())


def plan_to_keep(directory: RunDirectory, config: RunConfig) -> Path | None:
    """Return the plan of the run where this part can use it: the same plan, the same bits."""
    launched = env.launched()
    size = launched.size if launched else 1
    per_node = config.comm.ranks_per_node or (launched.local_size if launched else 1) or size
    try:
        stored = plan_file.read(directory.plan)
        before = load(directory.config).config
    except ConfigError:
        return None
    same_world = sum(stored.nodes) == size and stored.nodes[0] == min(per_node, size)
    return directory.plan if same_world and before.comm == config.comm else None


def _is_mathematics(name: str) -> bool:
    table = name.partition(".")[0]
    return name == "seed" or (table in _MATHEMATICS and name not in _NOT_MATHEMATICS)
