import sys

import pytest

import hpctrain.horovod.shim


@pytest.fixture
def shim(monkeypatch):
    """The shim in this process for one test, whatever another test has imported before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    hpctrain.horovod.shim.install()
    yield
    hpctrain.horovod.shim.uninstall()
