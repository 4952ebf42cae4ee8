"""One world for each module of tests."""

from collections.abc import Generator
from types import ModuleType

import pytest

import hpctrain


@pytest.fixture(scope="module")
def hvd() -> Generator[ModuleType]:
    """Initialise the world, and take leave of it after the last test of the module."""
    hpctrain.init()
    yield hpctrain
    hpctrain.shutdown()
