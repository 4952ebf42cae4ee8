import sys

import pytest
import torch
from torch.nn import functional

from hpctrain.core.errors import ConfigError
from hpctrain.core.target import make_importable
from hpctrain.train.targets import call, member, resolve


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "mine_for_targets.py").write_text(
        "def model(width, depth=1):\n    return width * depth\n_hidden = 3\nvalue = 3\n"
    )
    (tmp_path / "broken_for_targets.py").write_text("import no_such_package_at_all\n")
    make_importable(tmp_path)
    yield tmp_path
    sys.modules.pop("mine_for_targets", None)


def test_a_module_beside_the_configuration_is_found_first(folder):
    assert resolve("mine_for_targets:model", "model.target")(3) == 3
    assert sys.path[0] == str(folder)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", 'model.target names a function as "module:function", got ""'),
        ("mine_for_targets", 'as "module:function", got "mine_for_targets"'),
        ("nowhere_at_all:f", "there is no module nowhere_at_all; put it beside"),
        ("broken_for_targets:f", "cannot be imported: No module named 'no_such_package_at_all'"),
        ("mine_for_targets:modle", "mine_for_targets has no modle; did you mean model?"),
        ("mine_for_targets:value", "is of type int, nothing to call"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_name_that_means_nothing_says_what_is_missing(target, message):
    with pytest.raises(ConfigError) as caught:
        resolve(target, "model.target")
    assert message in str(caught.value)


def test_an_error_inside_the_users_module_is_not_hidden(folder):
    (folder / "raising_for_targets.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        resolve("raising_for_targets:f", "model.target")


@pytest.mark.usefixtures("folder")
def test_wrong_arguments_are_told_with_those_that_exist():
    model = resolve("mine_for_targets:model", "model.target")
    assert call(model, (), {"width": 2, "depth": 3}, "model.args") == 6
    with pytest.raises(ConfigError, match=r"model.args: model .*'widht'; did you mean width\?"):
        call(model, (), {"widht": 2, "width": 1}, "model.args")
    with pytest.raises(ConfigError, match="missing a required argument: 'width'"):
        call(model, (), {}, "model.args")


def test_arguments_in_first_place_are_not_offered():
    def loss(output, label, *, smoothing=0.0):
        return output, label, smoothing

    with pytest.raises(ConfigError, match="did you mean smoothing"):
        call(loss, (1, 2), {"smothing": 1}, "loss.args")


def test_names_of_torch_are_members():
    assert member(functional, "mse_loss", "loss.target") is functional.mse_loss
    with pytest.raises(ConfigError, match=r"did you mean SGD\?"):
        member(torch.optim, "SDG", "optimizer.name")
