"""Parameters that are frozen, unfrozen, added or replaced while replicas diverge."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.core.errors import CommError, MismatchError
from tests.gradients.program_oracle import Oracle
from tests.gradients.training import LAST, global_batch, largest_difference, part_of
from tests.local_sgd.local_methods import METHODS, state_of

RANKS = pytest.mark.ranks(2, 3)

NAMES = [*METHODS.keys() - {"local, state reset", "local, schedule", "diloco, bf16"}]
NAMES.sort()


class Layers(nn.Module):
    """Layers that a test can add, freeze and replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = ((64, 12), (12, 12), (12, 12), (12, 10))
        self.layers = nn.ModuleList(nn.Linear(*size).double() for size in sizes)
        self.shadow = nn.Parameter(torch.zeros(10).double(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double()


def make() -> tuple[Layers, torch.optim.SGD]:
    """Return a model with a frozen second layer, and its optimizer."""
    model = Layers()
    model.layers[1].requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def unfreeze(model: Layers, _: torch.optim.SGD) -> None:
    model.layers[1].requires_grad_(True)


def freeze(model: Layers, optimizer: torch.optim.SGD) -> None:
    optimizer.zero_grad()
    model.layers[2].requires_grad_(False)


def exchange_layers(model: Layers, optimizer: torch.optim.SGD) -> None:
    """Freeze a layer and unfreeze another one of the same shapes."""
    freeze(model, optimizer)
    unfreeze(model, optimizer)


def add_group(model: Layers, optimizer: torch.optim.SGD) -> None:
    torch.manual_seed(1)
    model.layers.insert(2, nn.Linear(12, 12).double())
    optimizer.add_param_group({"params": model.layers[2].parameters(), "lr": 0.05})


def change_dtype(model: Layers, optimizer: torch.optim.SGD) -> None:
    optimizer.zero_grad()
    optimizer.state.clear()
    model.layers[2].float()


def change_shape(model: Layers, optimizer: torch.optim.SGD) -> None:
    torch.manual_seed(2)
    old = {*model.layers[3].parameters()}
    model.layers[3] = nn.Linear(12, 10, bias=False).double()
    model.layers[3].weight.data = model.layers[3].weight.data.t().contiguous().t()
    (group,) = optimizer.param_groups
    group["params"] = [p for p in group["params"] if p not in old] + [model.layers[3].weight]
    for parameter in old:
        optimizer.state.pop(parameter, None)


def assign(model: Layers, optimizer: torch.optim.SGD) -> None:
    """Replace all tensors of the model, and give the new ones to the optimizer."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    model.load_state_dict(state, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = list(model.parameters())


def shadow(model: Layers, _: torch.optim.SGD) -> None:
    """Change a parameter that is not trained, like a moving average."""
    with torch.no_grad():
        model.shadow.lerp_(model.layers[3].bias, 0.5)


TRAINED = ["layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias"]

CHANGES = (
    unfreeze,
    freeze,
    exchange_layers,
    add_group,
    change_dtype,
    change_shape,
    assign,
    shadow,
)


def backward(model: Layers, optimizer: torch.optim.SGD, number: int, rank: int, size: int) -> None:
    images, labels = part_of(global_batch(number), rank, size)
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()


def step(model: Layers, optimizer: torch.optim.SGD, number: int, rank: int, size: int) -> None:
    backward(model, optimizer, number, rank, size)
    optimizer.step()


def bits(model: nn.Module) -> bytes:
    return b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())


def train(world, model, optimizer, numbers: range, at: int = -1, change=None) -> None:
    """Take steps, with ``change`` before step ``at``."""
    for number in numbers:
        if number == at:
            change(model, optimizer)
        step(model, optimizer, number, world.rank, world.size)


def runs(hvd, world, name: str, at: int, change, num_steps: int = 11) -> Layers:
    """Train by a method; return the model."""
    model, optimizer = make()
    with METHODS[name](hvd, model, optimizer):
        train(world, model, optimizer, range(num_steps), at, change)
    return model


EVERY_PLACE = pytest.param((0, 3, 4, 6, 7, 8, 10), 11, marks=pytest.mark.conformance)


@RANKS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("places", "num_steps"),
    [((5,), 6), EVERY_PLACE],  # in a round with an averaging in flight, and at all steps
    ids=["in a round", "everywhere"],
)
def test_replicas_are_identical_after_any_change(world, hvd_nodes, name, places, num_steps):
    for change in CHANGES:
        for at in places:
            model = runs(hvd_nodes, world, name, at, change, num_steps)
            assert len(set(world.allgather(bits(model)))) == 1, (change.__name__, at)


# -- the expected result, computed by a process that has all replicas --------------------------


def foretold(name: str, size: int, at: int, change) -> nn.Module:
    """Return the first replica after the steps of ``runs``, computed with torch alone."""
    oracle = Oracle("", size, [[0], [1]] if size == 2 else [[0, 1], [2]])
    replicas = [make() for _ in range(size)]
    for names, replica in zip(oracle.names, replicas, strict=True):
        METHODS[name](names["hvd"], *replica)
    (method,) = oracle.made
    for number in range(11):
        for rank, (model, optimizer) in enumerate(replicas):
            if number == at:
                change(model, optimizer)
            backward(model, optimizer, number, rank, size)
        oracle.shared.clear()  # the gradients of this step replace them
        method.reduce()
        for _, optimizer in replicas:
            optimizer.step()
        method.after_step()
    method.finish()
    return replicas[0][0]


@RANKS
@pytest.mark.parametrize(
    "at", [5, *(pytest.param(at, marks=pytest.mark.conformance) for at in (4, 7))]
)
@pytest.mark.parametrize("name", ["local", "post local", "hierarchical", "diloco", "staged"])
def test_changed_parameters_are_averaged_as_in_the_formula(world, hvd_nodes, name, at):
    changes = (unfreeze, freeze, exchange_layers)
    for change in (*changes, shadow) if name in {"local", "hierarchical"} else changes:
        found = runs(hvd_nodes, world, name, at, change)
        expected = foretold(name, world.size, at, change)
        assert largest_difference(found, expected) < 1e-12, change.__name__


SAME = "must be the same on every rank|must change on all ranks"


@RANKS
@LAST
@pytest.mark.parametrize("name", NAMES)
def test_a_change_on_one_rank_is_an_error_on_every_rank(world, hvd_nodes, name):
    changes = [unfreeze, change_dtype]
    error, message = MismatchError, SAME
    if world.size == 3 and name.startswith(("hierarchical", "staged")):
        # The ranks of one node detect the change first; other ranks get the reason when they wait.
        changes, error, message = changes[:1], CommError, f"{SAME}|has left a block"
    for change in changes:
        with pytest.raises(error, match=message):
            runs(hvd_nodes, world, name, 5, change if world.rank else lambda *_: None)


@RANKS
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_with_changed_parameters_has_the_same_bits(world, hvd_nodes, name):
    states = {}
    model, optimizer = make()
    with METHODS[name](hvd_nodes, model, optimizer) as method:
        for numbers in (range(6), range(6, 9), range(9, 11)):
            states[numbers.start] = state_of(model, optimizer, method)
            train(world, model, optimizer, numbers, 5, exchange_layers)
    whole = bits(model)
    for stop, changes_late in ((6, True), (9, False)):
        model, optimizer = make()
        if not changes_late:
            exchange_layers(model, optimizer)
        with METHODS[name](hvd_nodes, model, optimizer) as method:
            if changes_late:
                exchange_layers(model, optimizer)
            # an optimizer does not copy the tensors of a state
            state = copy.deepcopy(states[stop])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            method.load_state_dict(state["method"])
            train(world, model, optimizer, range(stop, 11))
        assert bits(model) == whole, (stop, changes_late)


@RANKS
def test_parameters_changed_by_a_fused_kernel_are_averaged(world, hvd_nodes):
    model, optimizer = make()
    with hvd_nodes.LocalSGD(model, optimizer, 4) as method:
        train(world, model, optimizer, range(4))
        optimizer.param_groups[0]["fused"] = True
        step(model, optimizer, 4, world.rank, world.size)
        freeze(model, optimizer)
        assert method.replica.own_state() == [["layers.0.weight", "layers.0.bias", *TRAINED]]
    assert len(set(world.allgather(bits(model)))) == 1


@RANKS
def test_an_optimizer_parameter_outside_the_model_is_rejected(hvd_nodes):
    model, optimizer = make()
    scale = nn.Parameter(torch.ones(()).double())
    optimizer.add_param_group({"params": [scale]})
    method = hvd_nodes.LocalSGD(model, optimizer, 2)
    images, labels = part_of(global_batch(0), hvd_nodes.rank(), hvd_nodes.size())
    cross_entropy(model(images) * scale, labels).backward()
    optimizer.step()
    with pytest.raises(MismatchError, match="1 that are not in it"):
        optimizer.step()
    method.close()


@pytest.mark.ranks(2)
def test_parameters_frozen_in_synchronous_steps_are_not_sent_again(world, hvd_nodes):
    model, optimizer = make()
    with hvd_nodes.PostLocalSGD(model, optimizer, 2, start=2) as method:
        train(world, model, optimizer, range(3), 1, freeze)
        before = method.facts["bytes_sent"]
        train(world, model, optimizer, range(3, 4))
        travelled = method.facts["bytes_sent"] - before
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        assert trained <= travelled < trained + 64 * 4


@RANKS
@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_are_sent_once_more_and_averaged_is_identical_within_a_round(
    world, hvd_nodes, name
):
    model, optimizer = make()
    with METHODS[name](hvd_nodes, model, optimizer) as method:
        train(world, model, optimizer, range(7), 5, freeze)
        before = bits(model)
        with method.averaged():
            assert len(set(world.allgather(bits(model)))) == 1
        assert bits(model) == before
        train(world, model, optimizer, range(7, 17))
        roster = method.replica.roster
        for one in (roster, *roster.inner):
            assert not {"layers.2.weight", "layers.2.bias"} & {*one.shared_state(), *one.changed()}
