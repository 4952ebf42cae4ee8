"""A world for each test: on one node, and on nodes of two ranks."""

from collections.abc import Generator
from types import ModuleType

import pytest

import hpctrain


@pytest.fixture(params=(None, 2), ids=("one node", "nodes of two"))
def hvd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """Initialise the world; a test's parameter ``overlap`` says when (small) buckets travel."""
    if overlap := request.node.callspec.params.get("overlap"):
        monkeypatch.setenv("HPCTRAIN_OVERLAP", overlap)
        monkeypatch.setenv("HPCTRAIN_BUCKET_BYTES", "4 KiB")
    hpctrain.init(ranks_per_node=request.param)
    yield hpctrain
    hpctrain.shutdown()
