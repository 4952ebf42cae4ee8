"""A world for each test: on one node, and on nodes of two ranks."""

from collections.abc import Generator
from types import ModuleType

import pytest

import hpctrain


@pytest.fixture(params=("thread", "inline", "end"))
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gradients travel in each way in turn, in many small buckets."""
    monkeypatch.setenv("HPCTRAIN_OVERLAP", request.param)
    monkeypatch.setenv("HPCTRAIN_BUCKET_BYTES", "4 KiB")


@pytest.fixture(params=(None, 2), ids=("one node", "nodes of two"))
def hvd(request: pytest.FixtureRequest) -> Generator[ModuleType]:
    """Initialise the world."""
    if "overlap" in request.fixturenames:
        request.getfixturevalue("overlap")
    hpctrain.init(ranks_per_node=request.param)
    yield hpctrain
    hpctrain.shutdown()


@pytest.fixture
def hvd_nodes(world) -> Generator[ModuleType]:
    """Initialise a world of nodes of 1 and 1, 2 and 1, or 2 and 2 ranks."""
    hpctrain.init(ranks_per_node=1 if world.size == 2 else 2)
    yield hpctrain
    hpctrain.shutdown()
