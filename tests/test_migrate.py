"""Check that the guide ``horovod-names`` has every name of Horovod, with equal arguments."""

import ast
import importlib
import inspect
import re
import types
from functools import reduce
from importlib import resources

import pytest

import hpctrain
from tests.horovod_vocabulary import FUNCTIONS, METHODS, OTHERS

GUIDE = resources.files("hpctrain.guide").joinpath("horovod-names.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([\w.()]+)` \| (.+) \|$", GUIDE, re.MULTILINE)
IN_THE_TABLE = {name for name, _ in ROWS}
OWN = {"DistributedOptimizer()", "is_homogeneous", "elastic.State", "elastic.ObjectState"}
"""What rows are about that ``dir(horovod.torch)`` does not have."""


def find(name, root=hpctrain):
    return reduce(getattr, name.split("."), root)


def parameters(text):
    """Return parameters in Horovod's notation: names, and defaults as text or None."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args
    names = [each.arg for each in arguments.args]
    defaults = [ast.unparse(each) for each in arguments.defaults]
    return dict(zip(names, [None] * (len(names) - len(defaults)) + defaults, strict=True))


def value_of(text):
    """Return the value of a default: a literal, or a name of hpctrain."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return find(text)


def refusal(function, text):
    """Return the reason why the function does not accept Horovod's arguments, or None."""
    wanted = parameters(text)
    ours = [
        each for each in inspect.signature(function).parameters.values() if each.name != "self"
    ]
    places = [each for each in ours if each.kind == each.POSITIONAL_OR_KEYWORD]
    if [each.name for each in places[: len(wanted)]] != list(wanted):
        return f"takes {[each.name for each in places]}, Horovod's {list(wanted)}"
    for each in places:
        has_default = each.default is not each.empty
        if each.name not in wanted and not has_default:
            return f"wants {each.name}, which Horovod's does not have"
        default = wanted.get(each.name)
        if default is not None and not (has_default and each.default == value_of(default)):
            return f"{each.name} is {each.default} by default, Horovod's {default}"
    return None


def test_every_name_has_one_row_with_text():
    assert len(IN_THE_TABLE) == len(ROWS)
    assert all(len(text) > 2 for _, text in ROWS)


def test_every_name_of_horovod_has_a_row():
    assert {*FUNCTIONS, *OTHERS} - IN_THE_TABLE == set()


def test_every_row_has_an_existing_name():
    for name in IN_THE_TABLE:
        if "()" not in name:
            find(name)


def test_every_row_has_a_name_of_horovod():
    known = {*FUNCTIONS, *OTHERS, *OWN}
    rows = {name.partition(".")[0] if "()" in name else name for name in IN_THE_TABLE}
    assert rows - known == set()


def test_exports_beyond_horovod_are_listed():
    """A new export that Horovod also has must be added to the list, and so to the table."""
    exported = {name for name in hpctrain.__all__ if name not in {*FUNCTIONS, *OTHERS}}
    local = {"DiLoCo", "HierarchicalLocalSGD", "LocalSGD", "PostLocalSGD", "StagedSGD"}
    local |= {"AsyncSGD", "Downpour", "Hogwild", "StaleSynchronous", "stable_rate"}
    local |= {"ShardedEmbedding"}
    ours = {"__version__", "check_replicas", "current", "run", "is_homogeneous", "record"}
    ours |= {"shard_data", "Resources"}
    ours |= {"submit", "Job", "should_stop", "STOPPED", "watch_noise"}
    errors = {name for name in exported if name.endswith(("Error", "Warning"))}
    aliases = {name for name in exported if "all_gather" in name or "reduce_scatter" in name}
    assert exported == ours | local | errors | aliases


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_horovods_arguments_in_its_order(name):
    assert refusal(find(name), FUNCTIONS[name].replace(", **kwargs", "")) is None


@pytest.mark.parametrize("owner", METHODS)
def test_methods_take_horovods_arguments_in_its_order(owner):
    for name, text in METHODS[owner].items():
        assert refusal(getattr(find(owner), name), text) is None, name


def test_an_optimizer_has_horovods_methods():
    import torch  # noqa: PLC0415 - this file is read without it

    hpctrain.init()
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer = hpctrain.DistributedOptimizer(plain)
    for name in IN_THE_TABLE:
        if name.startswith("DistributedOptimizer()."):
            assert callable(getattr(optimizer, name.partition(".")[2]))
    hpctrain.shutdown()


def test_different_arguments_are_found():
    def ours(tensor, name=None, op=None, *, extra=1):
        pass

    assert refusal(ours, "tensor, name=None") is None
    assert "takes" in refusal(ours, "tensor, op=None, name=None")
    assert "default" in refusal(ours, "tensor, name='x'")
    assert "wants tensor" in refusal(ours, "")


# With an installed Horovod


@pytest.fixture(scope="module")
def horovod():
    return importlib.import_module("horovod.torch")


def public_names(horovod):
    def members(owner, prefix):
        return {f"{prefix}.{name}" for name in dir(owner) if not name.startswith("_")}

    names = {
        name
        for name, value in vars(horovod).items()
        if not name.startswith("_")
        and (name == "elastic" or not isinstance(value, types.ModuleType))
    }
    names |= {f"elastic.{name}" for name in horovod.elastic.__all__}
    names |= members(horovod.Compression, "Compression") | members(
        horovod.ProcessSet, "ProcessSet"
    )
    return names - {"check_extension"}


@pytest.mark.requires("horovod-module")
def test_every_name_of_the_installed_horovod_has_a_row(horovod):
    assert public_names(horovod) - IN_THE_TABLE == set()
    assert public_names(horovod) == {*FUNCTIONS, *OTHERS}


@pytest.mark.requires("horovod-module")
def test_the_list_has_the_arguments_of_the_installed_horovod(horovod):
    for name, text in FUNCTIONS.items():
        found = inspect.signature(find(name, horovod)).parameters
        wanted = parameters(text.replace(", **kwargs", ""))
        if set(found) == {"args", "kwargs"}:  # passed on to a function that cannot be inspected
            continue
        assert [each for each in found if each not in {"self", "kwargs"}] == list(wanted), name
