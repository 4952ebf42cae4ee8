import sys

import pytest

import hpctrain.shim


@pytest.fixture
def shim(monkeypatch):
    """The shim in this process for one test, whatever another test has imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    hpctrain.shim.install()
    yield
    hpctrain.shim.uninstall()
