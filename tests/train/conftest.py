"""Fixtures: a world for each test, and a configuration that uses ``problem.py``."""

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

import hpctrain
from hpctrain.runtime.world import World, current
from hpctrain.train.load_config import load
from hpctrain.train.run_config import RunConfig


@pytest.fixture
def here() -> Generator[World]:
    """Initialize the world, with two ranks per node."""
    hpctrain.init(ranks_per_node=2)
    yield current()
    hpctrain.shutdown()


@pytest.fixture
def shared(tmp_path: Path, here: World) -> Path:
    return here.comm.broadcast_object(tmp_path)


@pytest.fixture
def configure(shared: Path) -> Callable[..., RunConfig]:
    """Function that returns the configuration of these tests, changed as by ``--set``."""

    def make(*overrides: str) -> RunConfig:
        base = [
            "model.target=tests.train.problem:model",
            "data.target=tests.train.problem:data",
            f"data.args.folder={shared}/d",
            "train.global_batch=53",  # all samples
        ]
        return load(None, [*base, *overrides]).config

    return make
