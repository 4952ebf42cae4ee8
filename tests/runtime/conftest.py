"""A world for each test."""

from collections.abc import Generator
from types import ModuleType

import pytest

import hpctrain


@pytest.fixture
def hvd() -> Generator[ModuleType]:
    """Initialise the world and take leave of it."""
    hpctrain.init()
    yield hpctrain
    hpctrain.shutdown()
