import sys

import pytest

import hpctrain.horovod.shim


@pytest.fixture
def shim(monkeypatch):
    """Install the shim for one test, without modules that earlier tests imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    hpctrain.horovod.shim.install()
    yield
    hpctrain.horovod.shim.uninstall()
