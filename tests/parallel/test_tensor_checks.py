"""Tensor parallel ranks whose models or inputs would differ raise an error on all ranks."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout

from hpctrain import ConfigError, MismatchError, TopologyError
from hpctrain.parallel import Pipeline, build_mesh, context_attention, tensor_parallel
from tests.parallel.training import lm, transformer

pytestmark = [pytest.mark.usefixtures("nodes"), pytest.mark.ranks(2)]

GIVEN = torch.arange(8).view(1, 8)
NO_ATTENTION = {name: role for name, role in lm.ROLES.items() if "attention" not in name}
NO_EMBEDDING = {name: role for name, role in lm.ROLES.items() if name != "embedding"}


class ByHand(lm.Attention):
    """Attention without torch's scaled_dot_product_attention."""

    @staticmethod
    def attend(query, key, value):
        return (query @ key.mT).softmax(-1) @ value


class Drops(nn.Module):
    def forward(self, x):
        return dropout(x, 0.5, self.training)


def rows():
    return build_mesh(tp=2)["tp"]


def forward(model, roles=lm.ROLES, given=GIVEN, *, sequence=False):
    return tensor_parallel(model, rows(), roles, sequence=sequence)(given)


def with_dropout():
    model = transformer()
    model.norm = nn.Sequential(model.norm, Drops())
    return model


def with_attention(kind):
    model = transformer(depth=1)
    model.blocks[0].attention = kind(16, 4).double()
    return model


def test_sequence_parallelism_needs_a_divided_embedding():
    for model, roles in ((transformer(), NO_EMBEDDING), (nn.Sequential(nn.Linear(4, 4)), {})):
        with pytest.raises(ConfigError, match="embedding must have the role vocabulary"):
            tensor_parallel(model, rows(), roles, sequence=True)
    model = transformer()
    model.norm = nn.BatchNorm1d(16)
    with pytest.raises(ConfigError, match="norm, a BatchNorm1d, combines positions"):
        tensor_parallel(model, rows(), lm.ROLES, sequence=True)


@pytest.mark.parametrize("kind", [lm.Attention, ByHand])
def test_attention_sees_the_whole_sequence(kind):
    with pytest.raises(ConfigError, match="gets 4 positions, 1 of 2 parts; assign"):
        forward(with_attention(kind), NO_ATTENTION, sequence=True)
    assert forward(with_attention(kind), sequence=True).shape == (1, 8, 256)
    whole = forward(with_attention(kind), NO_ATTENTION).full_tensor()
    torch.testing.assert_close(whole, with_attention(kind)(GIVEN))


def test_replicas_of_a_layer_draw_the_same_random_numbers():
    rank, model = dist.get_rank(), with_dropout()
    tensor_parallel(model, rows(), lm.ROLES)
    torch.manual_seed(0)
    scores = [model(GIVEN).full_tensor() for _ in range(3)]
    assert not torch.equal(scores[0], scores[1])
    torch.rand(rank)
    with pytest.raises(MismatchError, match=r"torch.manual_seed\(\) with the same number"):
        model(GIVEN)  # the fourth forward
    model.eval()(GIVEN)  # eval() draws no random numbers
    torch.manual_seed(rank)
    for quiet in (lambda: forward(transformer()), lambda: forward(with_dropout(), sequence=True)):
        assert quiet().shape == (1, 8, 256)
        torch.manual_seed(rank)


def test_tokens_outside_the_vocabulary_are_an_error():
    for token in (-1, 256):
        with pytest.raises(ConfigError, match=f"must be from 0 to 255, got {token}; use"):
            forward(transformer(), given=torch.tensor([[1, token]]))


def test_invalid_roles_and_meshes_are_an_error_on_all_ranks():
    rank, mesh = dist.get_rank(), build_mesh(tp=2)
    lacking = {name: role for name, role in lm.ROLES.items() if not name.endswith("attention.out")}
    first = {"*.attention.out": "row"}
    for roles, output in (
        (lacking, "got column for blocks.0.attention.query without a row"),
        (first, "got row for blocks.0.attention.out without a column"),
        ({**lm.ROLES, "*.feed.*": "row"}, "got column and row for blocks.0.feed.gate"),
    ):
        with pytest.raises(ConfigError, match=re.escape(output)):
            tensor_parallel(transformer(), mesh["tp"], roles)
    with pytest.raises(
        MismatchError, match=r"rank 0: sequence=True; rank 1: sequence=False; pass"
    ):
        tensor_parallel(transformer(), mesh["tp"], lm.ROLES, sequence=rank == 0)
    with pytest.raises(ConfigError, match="must get an undivided model"):
        tensor_parallel(tensor_parallel(transformer(), mesh["tp"], lm.ROLES), mesh["tp"], lm.ROLES)
    x = torch.zeros(1, 2, 2, 2)
    for call in (
        lambda: tensor_parallel(transformer(), mesh, lm.ROLES),
        lambda: Pipeline(transformer(), mesh, lm.LAYERS, loss=None, num_microbatches=2),
        lambda: context_attention(x, x, x, mesh),
    ):
        with pytest.raises(
            ConfigError, match=r"must have one axis, got 4 axes \(dp, pp, cp, tp\)"
        ):
            call()
    for size in (2.0, "2"):
        with pytest.raises(TopologyError, match=f"must be integers, got tp={size!r}"):
            build_mesh(tp=size)
