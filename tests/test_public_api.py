"""The public surface is the committed list: a change of it needs a line in CHANGELOG.md.

``python -m tests.test_public_api`` writes the list anew.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import hpctrain
from hpctrain.core.config import Settings
from hpctrain.gradients.optimizer import DistributedMethods

LIST = Path(__file__).with_name("public_api.txt")


def surface() -> list[str]:
    lines = []
    for name in sorted(hpctrain.__all__):
        value = getattr(hpctrain, name)
        lines.append(f"{name}{_signature(value)}" if callable(value) else name)
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


def test_every_public_function_has_a_docstring():
    for name in hpctrain.__all__:
        value = getattr(hpctrain, name)
        if callable(value):
            assert value.__doc__, f"{name} has no docstring"


def test_dir_lists_every_public_name():
    assert set(hpctrain.__all__) <= set(dir(hpctrain))


if __name__ == "__main__":
    LIST.write_text("\n".join(surface()) + "\n")
