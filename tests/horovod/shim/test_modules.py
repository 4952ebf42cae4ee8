import ast
import importlib
import importlib.util
import sys
import types
from importlib import metadata
from pathlib import Path

import cloudpickle
import pytest
from packaging.version import Version

import hpctrain
import hpctrain.horovod.shim
from hpctrain.core.errors import ConfigError
from hpctrain.horovod.shim.modules import FRAMEWORKS, MODULES

pytestmark = pytest.mark.usefixtures("shim")

NAMES = [(module, name) for module, names in MODULES.items() for name in sorted(names)]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_names_and_submodules(module):
    assert importlib.util.find_spec(module) is not None
    found = importlib.import_module(module)
    assert importlib.util.find_spec(module) is not None
    assert found.__hpctrain_shim__
    for name in found.__all__:
        assert name in dir(found)
        getattr(found, name)


def test_functions_and_classes_are_identical_to_those_of_hpctrain():
    from horovod.torch import allreduce, elastic  # noqa: PLC0415
    from horovod.torch.mpi_ops import Average, is_homogeneous  # noqa: PLC0415

    assert allreduce is hpctrain.allreduce
    assert Average is hpctrain.Average
    assert is_homogeneous is hpctrain.is_homogeneous
    assert elastic.TorchState is hpctrain.elastic.TorchState
    assert importlib.import_module("horovod").torch.mpi_ops.rank is hpctrain.rank
    assert elastic.run is hpctrain.elastic.run


def test_a_name_is_the_same_object_in_every_module():
    found = {}
    for module, name in NAMES:
        if name not in {"run", "init"} and not name.endswith("_built"):
            value = getattr(importlib.import_module(module), name)
            assert found.setdefault(name, value) is value, (module, name)


def test_the_version_compares_equal_to_that_of_horovod():
    version = importlib.import_module("horovod").__version__
    assert Version("0.28.1") <= Version(version) < Version("0.28.2")
    assert "hpctrain" in version


def test_import_star_works():
    names = {}
    exec("from horovod.torch import *", names)
    assert names["rank"] is hpctrain.rank
    assert names["elastic"].__name__ == "horovod.torch.elastic"


def test_a_missing_attribute_raises_an_error_with_its_name_and_the_guide():
    module = importlib.import_module("horovod.torch")
    with pytest.raises(AttributeError, match=r"'nonsense'.* horovod\.torch.*guide migrate"):
        module.nonsense  # noqa: B018
    assert not hasattr(module, "nonsense")


@pytest.mark.parametrize(
    "line",
    [
        "from horovod.torch import nonsense",
        "from horovod.torch.mpi_ops import nonsense",
        "from horovod.common.exceptions import nonsense",
        "import horovod.torch.nonsense",
        "import horovod.nonsense.more",
    ],
)
def test_a_missing_import_raises_an_error_with_its_name_and_the_guide(line):
    with pytest.raises(ImportError, match=r"'nonsense'.*guide migrate") as caught:
        exec(line)
    assert type(caught.value) is ImportError


@pytest.mark.parametrize(("module", "framework"), FRAMEWORKS.items())
def test_other_frameworks_are_rejected_by_name(module, framework):
    with pytest.raises(ImportError, match=f"only, not {framework}"):
        importlib.import_module(module)
    with pytest.raises(ImportError, match=f"only, not {framework}"):
        importlib.import_module(f"{module}.more")


def test_a_function_that_refers_to_a_module_can_be_pickled():
    module = importlib.import_module("horovod.torch")
    assert type(module) is types.ModuleType
    assert cloudpickle.loads(cloudpickle.dumps(lambda: module))() is module


def test_install_is_idempotent_and_uninstall_removes_all_modules(monkeypatch):
    before = list(sys.meta_path)
    hpctrain.horovod.shim.install()
    assert sys.meta_path == before
    importlib.import_module("horovod.torch.mpi_ops")
    hpctrain.horovod.shim.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    with pytest.raises(ConfigError, match="install\\(\\) first"):
        hpctrain.horovod.shim.install()
    assert not hpctrain.horovod.shim.is_installed()


# -- where Horovod is installed ----------------------------------------------------------------


def names_in(file):
    """Return the public names that a file defines or imports from Horovod, without running it."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            found |= {alias.asname or alias.name for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


@pytest.fixture
def horovod():
    """The file of each module of the installed Horovod."""
    top = Path(metadata.distribution("horovod").locate_file("horovod"))
    modules = {}
    for file in [top / "__init__.py", *(each for each in top.rglob("*.py") if each.parent != top)]:
        words = file.relative_to(top.parent).with_suffix("").parts
        module = ".".join(words[:-1] if words[-1] == "__init__" else words)
        modules[module] = file
    return modules


@pytest.mark.requires("horovod")
def test_every_name_of_the_installed_horovod_exists_or_is_rejected(horovod):
    assert len(horovod) > 100
    assert horovod.keys() >= MODULES.keys()
    for module in horovod.keys() - MODULES.keys():
        with pytest.raises(ImportError, match="guide migrate"):
            importlib.import_module(module)
    for module in MODULES:
        ours = importlib.import_module(module)
        for name in names_in(horovod[module]) - set(dir(ours)):
            with pytest.raises(AttributeError, match=f"{name!r}.*guide migrate"):
                getattr(ours, name)


@pytest.mark.requires("horovod")
def test_horovod_torch_has_exactly_the_names_of_horovod(horovod):
    ours = {name for name in dir(importlib.import_module("horovod.torch")) if name[0] != "_"}
    parts = {"compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"}
    theirs = names_in(horovod["horovod.torch"])
    assert theirs - ours == {"check_extension"}
    assert ours - theirs == parts
