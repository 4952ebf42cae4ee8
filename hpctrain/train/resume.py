"""Checks before a run is resumed: whether its configuration and plan are unchanged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.cluster import env
from hpctrain.comm.agreement import on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.plan.planning import StoredPlan
from hpctrain.core.checks import value_of
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import dumps, keys_of
from hpctrain.core.records import read
from hpctrain.optim.groups import EXEMPTIONS
from hpctrain.train.load_config import load
from hpctrain.train.run_config import RunConfig
from hpctrain.train.run_directory import RunDirectory

_MATHEMATICS = ("model", "data", "loss", "optimizer", "schedule", "train", "sync")
"""Tables whose keys affect the trained weights."""
_KEPT = ("seed", "data.order", "optimizer.name")
"""Keys that cannot change when a run is resumed, because its saved state depends on them."""
_NOT_MATHEMATICS = (
    "data.workers",
    "data.worker_timeout_s",
    "data.prefetch",
    "data.stage",
    "train.device",
    "train.activation_checkpointing",
    "train.on_non_finite",
    "train.on_spike",
    "train.spike_deviations",
    "train.spike_window",
    "train.snapshot_every",
    "train.lowered_rate",
    "train.lowered_steps",
    "train.max_skips",
    "train.check_replicas",
    "train.on_divergence",
)


def continues_run(config: RunConfig, directory: RunDirectory, *, asked: bool) -> bool:
    """Return True if this job continues the run in the directory.

    A run that wrote neither a checkpoint nor a test starts again from step 0.

    Args:
        config: configuration of this job.
        directory: directory of the run.
        asked: whether the command has ``--resume``.

    Raises:
        ConfigError: a newer hpctrain wrote the run; or ``asked`` is True, but there is no run.
    """
    directory.check_format()
    if asked and not directory.has_begun():
        raise ConfigError(
            f"--resume must find a run, but {directory.path} contains none; leave --resume out "
            f"to start one, or name its folder with --set output_dir=…"
        )
    return (asked or config.checkpoint.resume == "auto") and directory.is_used()


def finished(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the last record of a finished run; None if the run is not finished."""
    records = read(directory.metrics) if directory.metrics.exists() else []
    return records[-1] if records and records[-1]["event"] == "finished" else None


def check_same(directory: RunDirectory, config: RunConfig, *, changed: bool) -> list[str]:
    """Return one line for each key whose value differs from the stored configuration.

    Args:
        directory: directory of the run.
        config: configuration of this job.
        changed: whether keys that affect the trained weights may differ.

    Raises:
        ConfigError: a key that must not change differs.
    """
    before = load(directory.config).config
    lines = {
        name: f"{name} was {dumps(value_of(before, name))}, is {dumps(value_of(config, name))}"
        for name in keys_of(RunConfig)
        if name != "output_dir" and value_of(before, name) != value_of(config, name)
    }
    other = [line for name, line in lines.items() if _is_mathematics(name)]
    if finished(directory) and config.train.epochs > before.train.epochs:
        other.remove(lines["train.epochs"])  # a finished run may be extended
    if other and not changed:
        raise ConfigError(
            f"a resumed run must keep the keys that affect its results, but these differ from "
            f"{directory.config}: {'; '.join(other)}; set them back, choose another output_dir, "
            f"or add --changed"
        )
    if kept := [lines[name] for name in _KEPT if name in lines]:
        raise ConfigError(
            f"a resumed run must keep its seed, data.order and optimizer.name, but these differ "
            f"from {directory.config}: {'; '.join(kept)}; set them back, or start a run in "
            f"another output_dir"
        )
    return list(lines.values())


def given_arguments(directory: RunDirectory, config: RunConfig) -> list[str]:
    """Return the names of optimizer arguments that the stored or the new configuration sets.

    ``lr`` is excluded because each step sets the learning rate.
    """
    tables = [load(directory.config).config.optimizer, config.optimizer]
    args = [each for table in tables for each in (table.args, *table.groups)]
    names = [*(name for each in args for name in each), *EXEMPTIONS]
    return [name for name in dict.fromkeys(names) if name not in {"lr", "match"}]


def settled(config: RunConfig, directory: RunDirectory | None, comm: Communicator) -> RunConfig:
    """Return the configuration with the number of micro-shards filled in. Collective.

    If ``train.micro_shards`` is unset, a resumed run keeps the number of its stored
    configuration; a new run derives the number from the ranks.

    Args:
        config: configuration of this job.
        directory: directory of the run to resume; None for a new run.
        comm: all ranks.

    Raises:
        MismatchError: the stored configuration cannot be read, or the global batch is too small;
            on all ranks.
    """

    def micro_shards() -> int | None:
        before = load(directory.config).config.train if directory else config.train
        same = before.reproducible and not config.train.micro_shards
        return (before if same else config.train).micro_shards_on(comm.size)

    found = on_root(comm, micro_shards)
    if found is None or not config.train.reproducible:
        return config
    return replace(config, train=replace(config.train, micro_shards=found))


def plan_to_keep(directory: RunDirectory, config: RunConfig, engine: str) -> Path | None:
    """Return the path of the stored plan; with the same plan, sums stay bitwise identical.

    Return None if the plan does not fit the nodes, the table ``[comm]`` or the engine of this job.
    """
    try:
        stored = StoredPlan.read(directory.plan)
        before = load(directory.config).config
    except ConfigError:
        return None
    same = (
        before.comm == config.comm
        and stored.plan.engine == engine
        and _same_nodes(stored.nodes, config.comm.ranks_per_node)
    )
    return directory.plan if same else None


def _same_nodes(stored: tuple[int, ...], ranks_per_node: int) -> bool:
    """Return True if the nodes of this job have the numbers of ranks in ``stored``."""
    launched, hosts = env.launched(), env.ranks_of_nodes()
    if hosts is not None:
        most = ranks_per_node or max(hosts)
        return stored == tuple(
            min(most, ranks - start) for ranks in hosts for start in range(0, ranks, most)
        )
    if launched is None or launched.local_size is None or sum(stored) != launched.size:
        return False
    return stored[0] == min(ranks_per_node or launched.local_size, launched.local_size)


def _is_mathematics(name: str) -> bool:
    table = name.partition(".")[0]
    return name == "seed" or (table in _MATHEMATICS and name not in _NOT_MATHEMATICS)
