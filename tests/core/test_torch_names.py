"""Check names of torch: one module uses private names; public names exist in the oldest torch.

``torch_names.txt`` records the public names that the package uses. All of them exist in the oldest
supported torch, where ``make versions`` runs this file. After a check of new names
there, ``python -m tests.core.test_torch_names`` records the names.
"""

import ast
import importlib
import re
from functools import partial
from pathlib import Path

import pytest

import hpctrain
from hpctrain.core import torch_compat
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.runtime.initialization import join

PACKAGE = Path(hpctrain.__file__).parent
COMPAT = PACKAGE / "core/torch_compat.py"
RECORD = Path(__file__).with_name("torch_names.txt")
ALLOWED = {
    "torch.nn.modules.batchnorm._BatchNorm",  # the documented base of all such layers
    "torch.utils._pytree.tree_leaves",
    "torch.utils.tensorboard.SummaryWriter",  # of another package
}
PRIVATE = re.compile(r"(^|\.)_[^_]")
BUILT_IN_C = {"torch.distributed.ProcessGroupNCCL", "torch.distributed.ProcessGroupNCCL.Options"}


def names_of(path):
    """Return the full names of torch in a module, with the line of each."""
    tree, of_alias = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for one in node.names:
                of_alias[one.asname or one.name] = f"{node.module}.{one.name}"
                yield f"{node.module}.{one.name}", node.lineno
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    of_alias[one.asname or "torch"] = one.name if one.asname else "torch"
    for node in ast.walk(tree):
        parts, root = [], node
        while isinstance(root, ast.Attribute):
            parts.append(root.attr)
            root = root.value
        if parts and isinstance(root, ast.Name) and root.id in of_alias:
            yield ".".join([of_alias[root.id], *reversed(parts)]), node.lineno


def used():
    """Return all names of torch that the package uses, each with the place of its first use."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != COMPAT:
            for name, line in names_of(path):
                found.setdefault(name, f"{path.relative_to(PACKAGE)}:{line}")
    return found


def exists(name):
    """Return True if a name exists in this torch or in its modules."""
    owner, parts = importlib.import_module("torch"), name.split(".")[1:]
    for number, part in enumerate(parts, 1):
        try:
            owner = getattr(owner, part)
        except AttributeError:
            try:
                owner = importlib.import_module(".".join(["torch", *parts[:number]]))
            except ImportError:
                return False
    return True


def test_private_names_of_torch_are_in_one_module():
    private = {name: at for name, at in used().items() if PRIVATE.search(name)}
    assert private.keys() <= ALLOWED, {n: private[n] for n in private.keys() - ALLOWED}


def test_this_torch_has_every_name():
    there = used().keys() - ALLOWED - BUILT_IN_C
    assert [name for name in sorted(there) if not exists(name)] == []


def test_every_name_is_one_that_was_found_in_the_oldest_torch():
    recorded = set(RECORD.read_text().split())
    new = {name: at for name, at in used().items() if name not in recorded}
    assert not new, f"look for these in the oldest torch, then record them: {new}"


@pytest.mark.parametrize(
    "text", ["torch._C.x", "from torch._C import y", "import torch as t; t._z"]
)
def test_each_form_of_a_private_name_is_found(tmp_path, text):
    path = tmp_path / "one.py"
    path.write_text(text if "import" in text else f"import torch\n{text}")
    assert any(PRIVATE.search(name) for name, _ in names_of(path))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("start", [hpctrain.init, partial(join, Settings.from_env())])
@pytest.mark.parametrize(("version", "warns"), [((2, 5), True), ((2, 13), False), ((9, 0), True)])
def test_an_untested_torch_gives_one_line_of_rank_0_that_names_the_range(
    world, caplog, monkeypatch, start, version, warns
):
    monkeypatch.setattr(torch_compat, "VERSION", version)
    torch_compat.warn_if_untested.cache_clear()
    for _ in range(2):
        start()
        hpctrain.shutdown()
    found = [r.message for r in caplog.records if "was tested with torch 2.6 to 2.15" in r.message]
    assert len(found) == (warns and world.rank == 0)


def test_a_feature_of_a_newer_torch_names_the_version_found_and_the_version_needed():
    torch_compat.require("a feature", True, "2.7")
    with pytest.raises(
        ConfigError, match=r"torch must be 99.1 or later for a feature, got \d.*; update"
    ):
        torch_compat.require("a feature", False, "99.1")


if __name__ == "__main__":
    RECORD.write_text("\n".join(sorted(used())) + "\n")
