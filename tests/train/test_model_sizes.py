"""Sizes of a model are derived from its modules on the meta device; unknown sizes are omitted."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.core.errors import ConfigError
from hpctrain.train.model_sizes import sizes_of


class Plain(nn.Module):
    """A language model made of torch's layers."""

    def __init__(self, layers=7, hidden=96, heads=6, words=500, context=32, tied=False):
        super().__init__()
        self.words, self.places = nn.Embedding(words, hidden), nn.Embedding(context, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(hidden, words, bias=False)
        if tied:
            self.output.weight = self.words.weight


def plain():
    return Plain()


def tied():
    return Plain(tied=True)


def enormous():
    """Return a model of 200 GB, which only the meta device can hold."""
    return Plain(layers=60, hidden=8192, heads=64, words=50000, context=2048)


def configured():
    """Return a model with its sizes in ``config``, as in Hugging Face transformers."""
    model = nn.ModuleDict({"words": nn.Embedding(300, 64)})
    model["h"] = nn.ModuleList(nn.ModuleList([nn.Linear(64, 64)]) for _ in range(5))
    model.config = SimpleNamespace(n_head=4, n_positions=40)
    return model


def perceptron():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    return model


def shallow():
    return Plain(layers=1)


def curious():
    model = nn.Linear(3, 3)
    assert model.weight[0, 0].item() < 1
    return model


HERE = __name__


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_sizes_equal_the_arguments_of_the_model(name):
    model = getattr(sys.modules[HERE], name)()
    assert sizes_of(f"{HERE}:{name}") == {
        "parameters": sum(each.numel() for each in model.parameters()),
        "layers": 7,
        "hidden": 96,
        "heads": 6,
        "vocabulary": 500,
        "sequence": 32,
        "tied": name == "tied",
    }


def test_a_model_larger_than_memory_is_measured():
    found = sizes_of(f"{HERE}:enormous")
    assert found["parameters"] == pytest.approx(49.1e9, rel=0.01)
    assert (found["layers"], found["hidden"], found["heads"]) == (60, 8192, 64)


def test_sizes_of_another_library_are_read_from_its_configuration():
    found = sizes_of(f"{HERE}:configured")
    assert found.pop("parameters") == 300 * 64 + 5 * 65 * 64
    assert found == {
        "layers": 5, "hidden": 64, "heads": 4, "vocabulary": 300, "sequence": 40, "tied": True
    }  # fmt: skip


def test_unknown_sizes_are_omitted_and_frozen_parameters_are_not_counted():
    assert sizes_of(f"{HERE}:perceptron") == {"parameters": 72, "layers": 2}


def test_a_single_layer_is_counted_as_one():
    assert sizes_of(f"{HERE}:shallow")["layers"] == 1


def test_a_model_that_reads_its_weights_is_rejected():
    with pytest.raises(ConfigError, match=r"meta device, without values, but .*curious needs"):
        sizes_of(f"{HERE}:curious")
    assert torch.empty(0).device.type == "cpu"
    with pytest.raises(ConfigError, match="has no absent"):
        sizes_of(f"{HERE}:absent")
