"""Tensor and sequence parallel ranks train as one process does, with four sums per layer."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

from hpctrain import ConfigError, MismatchError
from hpctrain.parallel import build_mesh, tensor_parallel
from tests.parallel.training import (
    CLIP,
    adamw,
    alone,
    batches,
    check,
    lm,
    loss_of,
    transformer,
)

pytestmark = pytest.mark.usefixtures("nodes")


def divided(*, sequence=False, **shape):
    return tensor_parallel(transformer(**shape), rows(), lm.ROLES, sequence=sequence)


def rows():
    return build_mesh(tp=torch.distributed.get_world_size())["tp"]


def step(model, given, following):
    with loss_parallel():
        loss = loss_of(model(given), following)
        loss.backward()
    return loss.full_tensor().item()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("sequence", "tied"), [(False, False), (True, True)])
def test_ranks_train_as_one_process_does(sequence, tied):
    model = divided(sequence=sequence, tied=tied)
    optimizer, losses = adamw(model.parameters()), []
    for given, following in batches():
        optimizer.zero_grad()
        losses.append(step(model, given, following))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    check(losses, model.named_parameters(), tied=tied)
    assert len(list(model.parameters())) == len(alone()[1]) - tied


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_frozen_parameters_can_be_trained_later(sequence):
    one, model, ((given, following),) = transformer(), transformer(), batches(1)
    tensor_parallel(model.requires_grad_(False), rows(), lm.ROLES, sequence=sequence)
    step(model.requires_grad_(True), given, following)
    loss_of(one(given), following).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements
        expected = one.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        self.hidden = weakref.ref(hidden := x + 1)
        self.second(self.first(hidden)).sum().item()  # waits for the communication
        raise RuntimeError("out of memory")


@pytest.mark.ranks(2)
def test_a_failed_forward_releases_its_inputs():
    model = nn.Sequential(Failing())
    tensor_parallel(model, rows(), {"0.first": "column", "0.second": "row"})
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.ones(2, 4))
    gc.collect()
    assert model[0].hidden() is None


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("sequence", [False, True])
def test_a_layer_communicates_twice_forward_and_twice_backward(sequence):
    counts = []
    for depth in (1, 2):
        model, ((given, following),) = divided(sequence=sequence, depth=depth), batches(1)
        with CommDebugMode() as forward:
            scores = model(given)
        with CommDebugMode() as both, loss_parallel():
            loss_of(model(given), following).backward()
        output = [
            {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
            for mode in (forward, both)
        ]
        counts.append(output)
        assert isinstance(scores, DTensor)

    def more(where, name):
        one, two = (count[where].get(name, 0) for count in counts)
        return two - one

    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    forward = [more(0, name) for name in names]
    both = [more(1, name) for name in names]
    norms = 2  # the gradients of two norms, summed over the parts of the sequence
    assert forward == ([0, 2, 2] if sequence else [2, 0, 0])
    assert both == ([norms, 4, 4] if sequence else [4, 0, 0])


@pytest.mark.ranks(2)
def test_gradients_have_the_placement_of_parameters():
    model, ((given, following),) = divided(sequence=True), batches(1)
    step(model, given, following)
    one = transformer()
    loss_of(one(given), following).backward()
    for name, parameter in one.named_parameters():
        found = model.get_parameter(name).grad
        assert found.placements == model.get_parameter(name).placements
        if "norm" in name:
            assert found.placements == (Replicate(),)
            torch.testing.assert_close(found.to_local(), parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_gradients_accumulate_over_several_backwards():
    model, ((given, following),) = divided(sequence=True), batches(1)
    for part in (slice(4), slice(4, 8)):
        step(model, given[part], following[part])
    one = transformer()
    (2 * loss_of(one(given), following)).backward()
    for name, parameter in one.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_indivisible_models_are_an_error_on_all():
    size = torch.distributed.get_world_size()
    for change, output in (
        ({"blocks.*.feed.dwn": "row"}, "no module blocks.*.feed.dwn"),
        ({"head": "columns"}, "one of column, row, vocabulary, got 'columns' for head"),
        ({"norm": "column"}, "got column for norm, a RMSNorm; omit"),
    ):
        with pytest.raises(ConfigError, match=re.escape(output)):
            tensor_parallel(transformer(), rows(), {**lm.ROLES, **change})
    with pytest.raises(ConfigError, match=f"the 9 outputs of 0 must be divisible by the {size} "):
        tensor_parallel(nn.Sequential(nn.Linear(3, 9)), rows(), {"0": "column"})
    own = transformer()
    own.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="a module with submodules has scale"):
        tensor_parallel(own, rows(), lm.ROLES)
    model = divided(sequence=True)
    with pytest.raises(ConfigError, match=f"parallel ranks, got {size + 1}; pad"):
        model(torch.zeros(1, size + 1, dtype=torch.long))


@pytest.mark.ranks(2)
def test_ranks_with_different_models_or_samples_are_an_error_on_all():
    depth = 1 + min(torch.distributed.get_rank(), 1)
    with pytest.raises(MismatchError, match="the model of tensor parallel ranks must be the same"):
        divided(depth=depth)
    torch.manual_seed(torch.distributed.get_rank())
    samples = torch.randint(256, (2, 8))
    with pytest.raises(MismatchError, match="divide data among the ranks of dp only"):
        divided()(samples)
