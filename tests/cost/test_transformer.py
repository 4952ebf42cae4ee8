"""Check sizes of transformers: figures from papers, and estimates of sizes that are not given."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpctrain.core.errors import ConfigError
from hpctrain.cost.transformer import Transformer

PUBLISHED = {  # of Narayanan et al. 2021: billions of parameters by hidden size and layers
    (2304, 24): 1.7,
    (3072, 30): 3.6,
    (4096, 36): 7.5,
    (6144, 40): 18.4,
    (8192, 48): 39.1,
    (10240, 60): 76.1,
    (12288, 80): 145.6,
    (16384, 96): 310.1,
    (20480, 105): 529.6,
    (25600, 128): 1008.0,
}


@pytest.mark.parametrize(("hidden", "layers"), PUBLISHED)
def test_parameters_are_those_of_published_models(hidden, layers):
    model = Transformer.of(layers=layers, hidden=hidden)
    assert model.parameters / 1e9 == pytest.approx(PUBLISHED[hidden, layers], abs=0.051)
    assert model.layers * model.layer_parameters + model.embeddings == model.parameters


@pytest.mark.parametrize(("hidden", "layers"), PUBLISHED)
def test_operations_are_those_of_the_published_formula(hidden, layers):
    s, words = 2048, 51200
    model = Transformer(
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        parameters=12 * layers * hidden**2 + words * hidden,  # the formula has no biases
    )
    last = words / (12 * layers * hidden)
    step = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + last)
    found = 3 * (layers * model.layer_flops + model.output_flops)
    assert found == pytest.approx(step, rel=1e-12)


def test_seventy_billion_parameters_with_adam_are_more_than_a_terabyte():
    model = Transformer.of(70e9)
    assert model.state_bytes == 16
    assert model.state_bytes * model.parameters == 1.12e12


def test_activations_of_a_layer_are_those_of_the_published_formula():
    """For GPT-3, whose scores are 80 of 114 bytes of an element; without them 70 % are saved."""
    s, h, a = 2048, 12288, 96
    model = Transformer.of(layers=96, hidden=h, heads=a)
    kept, again = model.activations("none")
    assert kept == s * h * (34 + 5 * a * s / h) == s * h * 114
    assert again == 0
    assert model.activations("selective") == (34 * s * h, 80 * s * h)
    assert model.activations("selective")[0] / kept == pytest.approx(0.3, abs=0.002)
    assert model.activations("full") == (2 * s * h, 114 * s * h)
    assert model.output_activations == 4 * s * h * (1 + 51200 / h)


class Layer(nn.Module):
    """Define the layer of the formula: attention and MLP with dropout, each after a norm."""

    def __init__(self, hidden, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.mix, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, tokens, hidden = x.shape
        three = self.mix(self.norms[0](x)).chunk(3, -1)
        q, k, v = (each.view(batch, tokens, self.heads, -1).transpose(1, 2) for each in three)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(hidden / self.heads)
            mixed = functional.dropout(torch.softmax(scores, -1), 0.1) @ v
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))), 0.1)


@pytest.mark.parametrize("fused", [False, True])
def test_torch_keeps_as_many_bytes_of_a_layer_as_the_formula_says(fused):
    tokens, hidden, heads, batch = 256, 512, 8, 2
    layer = Layer(hidden, heads, fused).to(torch.bfloat16)
    inputs = torch.randn(batch, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weights = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()  # kept, so that no other storage gets its address
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(inputs)
    model = Transformer.of(
        layers=2, hidden=hidden, heads=heads, sequence=tokens, fused_attention=fused
    )
    found = sum(each.nbytes() for each in kept.values())
    # The formula has masks of one byte, as on GPUs; on CPUs they have two.
    masks = 2 * tokens * hidden + (0 if fused else heads * tokens**2)
    assert found == pytest.approx(batch * (model.activations("none")[0] + masks), rel=0.005)


def test_fused_attention_keeps_no_scores():
    model = Transformer.of(layers=2, hidden=128, fused_attention=True)
    assert model.activations("none") == model.activations("selective")


@pytest.mark.parametrize("parameters", [1e6, 2.5e7, 1.3e8, 1e9, 7.5e9, 7e10, 1.75e11, 1e12, 1e15])
def test_a_guessed_transformer_has_the_requested_parameters(parameters):
    model = Transformer.of(parameters, vocabulary=1000)
    assert model.parameters == parameters
    assert model.layer_parameters == pytest.approx(12 * model.hidden**2, rel=0.5)
    assert model.hidden % model.heads == 0
    given = Transformer.of(parameters, layers=5, vocabulary=1000)
    assert given.layers == 5
    assert given.layer_parameters == pytest.approx(12 * given.hidden**2, rel=0.3)


def test_guesses_are_near_published_models():
    found = Transformer.of(7.5e9)
    assert (found.hidden, found.layers, found.heads) == (4096, 36, 32)
    found = Transformer.of(175e9)
    assert (found.hidden, found.layers, found.heads) == (12288, 96, 96)


@pytest.mark.parametrize(
    ("sizes", "output"),
    [
        ({}, "use --params, or --layers and --hidden"),
        ({"layers": 3}, "got neither"),
        ({"parameters": math.nan}, "parameters must be above 0, got nan"),
        ({"parameters": math.inf}, "parameters must be below inf, got inf"),
        ({"parameters": -1.0}, "parameters must be above 0, got -1"),
        ({"parameters": 1e6, "layers": 2, "hidden": 64, "heads": 7}, "got 7 heads and a"),
        ({"parameters": 1e6, "hidden": 512}, "got 1e[+]06 in total, with 2.621e[+]07 for"),
        ({"layers": 2, "hidden": 64, "sequence": 0}, "sequence must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_each_other_are_refused(sizes, output):
    with pytest.raises(ConfigError, match=output):
        Transformer.of(**sizes)
