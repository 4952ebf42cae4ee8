"""The public surface is the committed list: a change of it needs a line in CHANGELOG.md.

``python -m tests.test_public_api`` writes the list anew.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import hpctrain
import hpctrain.checkpoint
import hpctrain.comm
import hpctrain.compress
import hpctrain.cost
import hpctrain.data
import hpctrain.optim
import hpctrain.parallel
from hpctrain.core.config import Settings
from hpctrain.gradients.optimizer import DistributedMethods

LIST = Path(__file__).with_name("public_api.txt")
PACKAGES = (
    hpctrain.checkpoint,
    hpctrain.comm,
    hpctrain.compress,
    hpctrain.cost,
    hpctrain.data,
    hpctrain.optim,
    hpctrain.parallel,
)


def surface() -> list[str]:
    lines = []
    for package in (hpctrain, *PACKAGES):
        prefix = package.__name__.removeprefix("hpctrain").lstrip(".")
        for name in sorted(package.__all__):
            value = getattr(package, name)
            signature = _signature(value) if callable(value) else ""
            lines.append(f"{prefix}{'.' * bool(prefix)}{name}{signature}")
    elastic = hpctrain.elastic
    lines += [f"elastic.{name}{_signature(getattr(elastic, name))}" for name in elastic.__all__]
    # An optimizer made by DistributedOptimizer is of torch's class, with these methods added.
    for name, member in sorted(vars(DistributedMethods).items()):
        if not name.startswith("_"):
            signature = _signature(member) if inspect.isfunction(member) else ""
            lines.append(f"DistributedOptimizer().{name}{signature}")
    lines += [f"HPCTRAIN_{field.name.upper()}" for field in dataclasses.fields(Settings)]
    return lines


def _signature(value: Callable[..., object]) -> str:
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""  # errors are caught, not made
    parameters = inspect.signature(value).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return re.sub(r" object at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))


def test_the_public_surface_is_the_committed_list():
    assert surface() == LIST.read_text().splitlines(), (
        "the public names changed: tell it in CHANGELOG.md, then run "
        "`python -m tests.test_public_api`"
    )


EVERY_PACKAGE = pytest.mark.parametrize(
    "package", [hpctrain, *PACKAGES], ids=lambda package: package.__name__
)


@EVERY_PACKAGE
def test_every_public_function_has_a_docstring(package):
    for name in package.__all__:
        value = getattr(package, name)
        if callable(value):
            assert value.__doc__, f"{name} has no docstring"


@EVERY_PACKAGE
def test_dir_lists_every_public_name(package):
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
        package.no_such_name  # noqa: B018


def test_guides_and_examples_import_public_names_alone():
    public = {package.__name__ for package in (hpctrain, *PACKAGES)}
    root = LIST.parents[1]
    files = [
        root / "README.md",
        *root.glob("hpctrain/guide/*.md"),
        *root.glob("examples/**/*.py"),
    ]
    for file in files:
        found = re.findall(r"^\s*(?:from|import) (hpctrain[.\w]*)", file.read_text(), re.MULTILINE)
        assert set(found) <= public, f"{file} goes deeper than the public packages"


if __name__ == "__main__":
    LIST.write_text("\n".join(surface()) + "\n")
