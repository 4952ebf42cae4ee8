"""Check that the public names equal the committed list: a change needs a line in CHANGELOG.md.

``python -m tests.test_public_api`` rewrites the list.
"""

import dataclasses
import inspect
import re
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
    """Return each public name with its signature, and each member of a public class."""
    lines = []
    for package in (hpctrain, *PACKAGES, hpctrain.elastic):
        prefix = package.__name__.removeprefix("hpctrain").lstrip(".")
        prefix = "elastic" if package is hpctrain.elastic else prefix
        for name in sorted(package.__all__):
            value = getattr(package, name)
            full = f"{prefix}{'.' * bool(prefix)}{name}"
            lines.append(f"{full}{_signature(value)}")
            if inspect.isclass(value) and not issubclass(value, BaseException):
                lines += _members(f"{full}()", value)
    # An optimizer made by DistributedOptimizer has the class of torch, with these members added.
    lines += _members("DistributedOptimizer()", DistributedMethods)
    lines += [f"HPCTRAIN_{field.name.upper()}" for field in dataclasses.fields(Settings)]
    return lines


_ATTRIBUTE = re.compile(r"\bself\.([a-z]\w*)(?:, self\.([a-z]\w*))*(?::[^=\n]+)? = ")


def _members(prefix: str, cls: type) -> list[str]:
    """Return the public members that hpctrain defines, also inherited members and attributes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("hpctrain"):
            continue
        stored = {
            name
            for match in _ATTRIBUTE.finditer(inspect.getsource(base))
            for name in match.groups()
        }
        for name in sorted(
            {*vars(base), *vars(base).get("__annotations__", {}), *stored} - {None}
        ):
            if not name.startswith("_"):
                member = inspect.getattr_static(cls, name, None)
                member = getattr(member, "__func__", member)
                found[name] = _signature(member) if inspect.isfunction(member) else ""
    return [f"{prefix}.{name}{found[name]}" for name in sorted(found)]


def _signature(value: object) -> str:
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    if is_error or not callable(value):  # users catch errors, and do not construct them
        return ""
    parameters = inspect.signature(value).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return re.sub(r" object at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))


def test_the_public_surface_is_the_committed_list():
    assert surface() == LIST.read_text().splitlines(), (
        "the public names changed: add an entry to CHANGELOG.md, then run "
        "`python -m tests.test_public_api`"
    )


EVERY_PACKAGE = pytest.mark.parametrize(
    "package", [hpctrain, *PACKAGES], ids=lambda package: package.__name__
)


def test_other_spellings_are_the_same_functions():
    assert hpctrain.reduce_scatter is hpctrain.reducescatter
    assert hpctrain.grouped_all_gather_async is hpctrain.grouped_allgather_async


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


def test_guides_and_examples_import_public_names_only():
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
