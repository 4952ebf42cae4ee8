"""Provide worlds of one and several nodes; a world is kept for the next tests if possible."""

from collections.abc import Generator
from types import ModuleType

import pytest

import hpctrain
from hpctrain.runtime.world import current


class Worlds:
    """Hold the current world and the arguments that it was made with."""

    made: tuple[int | None, str] | None = None

    def enter(self, per_node: int | None, overlap: str = "") -> None:
        """Initialize a world unless the current one has the same arguments. Collective."""
        if self.made == (per_node, overlap) and hpctrain.is_initialized():
            return
        self.leave()
        with pytest.MonkeyPatch.context() as patch:
            if overlap:  # and use many small buckets
                patch.setenv("HPCTRAIN_OVERLAP", overlap)
                patch.setenv("HPCTRAIN_BUCKET_BYTES", "4 KiB")
            hpctrain.init(ranks_per_node=per_node)
        self.made = (per_node, overlap)

    def leave(self) -> None:
        """Shut the world down. Collective."""
        hpctrain.shutdown()
        self.made = None


@pytest.fixture(scope="module")
def worlds() -> Generator[Worlds]:
    """Keep worlds for the tests of one file."""
    made = Worlds()
    yield made
    made.leave()


@pytest.fixture(scope="module", params=("thread", "inline", "end"))
def overlap(request: pytest.FixtureRequest) -> str:
    """Parametrize over the methods of sending gradients."""
    return request.param


@pytest.fixture(scope="module", params=(None, 2), ids=("one node", "nodes of two"))
def per_node(request: pytest.FixtureRequest) -> int | None:
    """Parametrize over one node and nodes of two ranks."""
    return request.param


def in_world(
    request: pytest.FixtureRequest, worlds: Worlds, *like: int | str | None
) -> Generator[ModuleType]:
    is_last = "last" in request.fixturenames
    if is_last:
        worlds.leave()
    worlds.enter(*like)
    yield hpctrain
    if is_last:
        worlds.leave()
    elif hpctrain.is_initialized():
        current().comm.rejoin()  # after a test of different calls


@pytest.fixture
def hvd(
    request: pytest.FixtureRequest, worlds: Worlds, per_node: int | None
) -> Generator[ModuleType]:
    """Provide hpctrain in an initialized world."""
    overlap = "overlap" in request.fixturenames and request.getfixturevalue("overlap")
    yield from in_world(request, worlds, per_node, overlap or "")


@pytest.fixture
def hvd_nodes(request: pytest.FixtureRequest, world, worlds: Worlds) -> Generator[ModuleType]:
    """Provide a world of nodes of 1 and 1, 2 and 1, or 2 and 2 ranks."""
    yield from in_world(request, worlds, 1 if world.size == 2 else 2)


@pytest.fixture
def last() -> None:
    """Provide a separate world for a test that breaks it or needs its own settings."""
