"""Provide one world for each module of tests."""

from collections.abc import Generator
from types import ModuleType

import pytest

import hpctrain


@pytest.fixture(scope="module")
def hvd() -> Generator[ModuleType]:
    """Initialize the world, and shut it down after the last test of the module."""
    hpctrain.init()
    yield hpctrain
    hpctrain.shutdown()
