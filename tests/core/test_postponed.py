"""Check that postponed modules are loaded at their first use."""

import importlib
import sys

import pytest

from hpctrain.core.lazy import postponed


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write two modules that import each other's names, and one that uses both."""
    (tmp_path / "lazily").mkdir()
    for name, text in {
        "__init__": "",
        "early": "loaded = True\n",
        "late": "from lazily import inner\nVALUE = [inner.NAME]\n",
        "inner": "NAME = 'inner'\n",
        "user/__init__": "",
        "user/main": "from lazily.early import loaded\nfrom lazily import late\n",
    }.items():
        path = tmp_path / "lazily" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "lazily"]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_module_is_loaded_at_the_first_use_of_an_attribute():
    with postponed("lazily", "lazily.user"):
        main = importlib.import_module("lazily.user.main")
    assert main.loaded
    assert {"lazily.early", "lazily.user.main"} <= sys.modules.keys()
    assert not {"lazily.late", "lazily.inner"} & sys.modules.keys()
    assert not hasattr(sys.modules["lazily"], "late")
    assert main.late.VALUE == ["inner"]
    assert main.late.VALUE is sys.modules["lazily.late"].VALUE
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = main.late.nothing


@pytest.mark.usefixtures("package")
def test_an_error_of_a_module_is_raised_at_each_use(tmp_path):
    (tmp_path / "lazily/late.py").write_text("import no_such_module\n")
    with postponed("lazily", "lazily.user"):
        main = importlib.import_module("lazily.user.main")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            _ = main.late.VALUE
