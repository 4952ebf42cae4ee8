"""``DiLoCo``: what it equals, which way it steps, fragments, delays and memory."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.local_sgd.diloco import divided
from tests.gradients.training import global_batch, make_model, part_of, sgd
from tests.local_sgd.local_methods import num_kinds, train, weights_of

SIZES = pytest.mark.ranks(1, 2, 4)
MANY = pytest.mark.ranks(2, 3, 4)


def plain_sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def run(hvd, num_steps: int, make_optimizer=plain_sgd, **options) -> torch.Tensor:
    """Train, and return the weights after the block."""
    model = make_model()
    optimizer = make_optimizer(model)
    with hvd.DiLoCo(model, optimizer, **options) as method:
        train(hvd, model, optimizer, method, 0, num_steps)
    return weights_of(model)


def alone(optimizer_of, num_steps: int) -> torch.Tensor:
    """Train by the plain loop on global batches."""
    model = make_model()
    optimizer = optimizer_of(model)
    for step in range(num_steps):
        images, labels = global_batch(step)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return weights_of(model)


@SIZES
@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_an_outer_step_after_each_inner_one_is_synchronous_sgd_or_nesterovs(hvd_nodes, mu):
    found = run(hvd_nodes, 12, steps=1, outer_lr=1.0, outer_momentum=mu)
    options = {"momentum": mu, "nesterov": True} if mu else {}
    plain = alone(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, **options), 12)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-13)


@SIZES
def test_without_an_outer_optimizer_it_is_local_sgd(hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.LocalSGD(model, optimizer, 4) as method:
        train(hvd_nodes, model, optimizer, method, 0, 12)
    found = run(hvd_nodes, 12, make_optimizer=sgd, steps=4, outer_lr=1.0, outer_momentum=0.0)
    torch.testing.assert_close(found, weights_of(model), rtol=0, atol=1e-13)


class Streaming:
    """Fragments and delay of all ranks in one process, by the words of the paper."""

    def __init__(self, size: int, steps: int, parts: list[list[str]], delay: int, keep: float):
        self.steps, self.parts, self.delay, self.keep = steps, parts, delay, keep
        self.models = [make_model() for _ in range(size)]
        self.outer = {n: p.detach().clone() for n, p in self.models[0].named_parameters()}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.outer.items()}
        self.arriving: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def train(self, num_steps: int) -> "Streaming":
        optimizers = [plain_sgd(model) for model in self.models]
        for step in range(num_steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, optimizers, strict=True)):
                images, labels = part_of(global_batch(step), rank, len(self.models))
                optimizer.zero_grad()
                cross_entropy(model(images), labels).backward()
                optimizer.step()
            with torch.no_grad():
                self.take_over(step + 1)
                self.send(step + 1)
                self.take_over(step + 1)
        return self

    @torch.no_grad()
    def end(self, step: int) -> "Streaming":
        """Take over what travels; what has been stepped since is sent, and taken over, now."""
        ends = [(n + 1) * self.steps // len(self.parts) for n in range(len(self.parts))]
        moved = [p for p, e in zip(self.parts, ends, strict=True) if (step - e) % self.steps]
        for due in sorted(self.arriving):
            self.take_over(due)
        self.delay = 0
        self.send(step, moved)
        self.take_over(step)
        return self

    def send(self, step: int, parts: list[list[str]] | None = None) -> None:
        for number, part in enumerate(self.parts):
            is_due = (step - 1) % self.steps + 1 == (number + 1) * self.steps // len(self.parts)
            if is_due if parts is None else part in parts:
                of_ranks = [dict(model.named_parameters()) for model in self.models]
                for name in part:
                    mean = sum(own[name] for own in of_ranks) / len(of_ranks)
                    gradient = (name, self.outer[name] - mean)
                    self.arriving.setdefault(step + self.delay, []).append(gradient)

    def take_over(self, step: int) -> None:
        for name, gradient in self.arriving.pop(step, []):
            self.momentum[name].mul_(0.9).add_(gradient)
            self.outer[name] -= 0.7 * (gradient + 0.9 * self.momentum[name])
            for model in self.models:
                model.get_parameter(name).lerp_(self.outer[name], 1 - self.keep)


@MANY
@pytest.mark.parametrize(
    ("fragments", "delay", "keep", "num_steps"),
    [
        (1, 0, 0.0, 12),
        (1, 0, 0.5, 13),
        (1, 4, 0.5, 22),
        (2, 6, 0.0, 13),
        (3, 0, 0.25, 22),
        (3, 2, 0.5, 12),
        (3, 3, 0.5, 22),
    ],
)
def test_fragments_and_delays_are_those_of_the_paper_to_the_end(
    world, hvd_nodes, fragments, delay, keep, num_steps
):
    """The end takes no outer step that nothing has earned: what was sent last has its own."""
    model = make_model()
    optimizer = plain_sgd(model)
    options = {"fragments": fragments, "delay": delay, "keep": keep}
    method = hvd_nodes.DiLoCo(model, optimizer, 6, **options)
    train(hvd_nodes, model, optimizer, method, 0, num_steps)
    parts = divided(list(make_model().named_parameters()), fragments)
    expected = Streaming(world.size, 6, parts, delay, keep).train(num_steps)

    def is_outer():
        outer = torch.cat([expected.outer[n].reshape(-1) for n, _ in model.named_parameters()])
        torch.testing.assert_close(weights_of(model), outer, rtol=0, atol=1e-13)

    own = weights_of(expected.models[world.rank])
    torch.testing.assert_close(weights_of(model), own, rtol=0, atol=1e-13)
    with method.averaged():
        is_outer()
    expected.end(num_steps)
    method.finish()
    is_outer()
    after = weights_of(model).clone()
    method.finish()
    assert torch.equal(after, weights_of(model))
    method.close()


@pytest.mark.ranks(4)
def test_the_outer_model_is_held_once_per_node(world, hvd_nodes):
    model = make_model()
    method = hvd_nodes.DiLoCo(model, sgd(model), 4)
    held = [
        vector.own.nbytes
        for part in method._exchange._anchored
        for vector in (*part._anchors, *part._momenta)
    ]
    of_node = sum(world.allgather(sum(held))) / 2
    once = 2 * sum(p.nbytes for p in model.parameters())
    assert once <= of_node <= 1.1 * once


@MANY
def test_a_round_that_all_sit_out_moves_nothing(world, hvd_nodes):
    model = make_model()
    optimizer = plain_sgd(model)
    method = hvd_nodes.DiLoCo(model, optimizer, 2)
    method.take_part(takes_part=False)
    train(hvd_nodes, model, optimizer, method, 0, 2)
    assert num_kinds(world, weights_of(model)) == world.size
    assert not method.rounds.agrees
    method.take_part(takes_part=True)
    train(hvd_nodes, model, optimizer, method, 2, 4)
    assert num_kinds(world, weights_of(model)) == 1
    method.close()


@MANY
def test_auto_decides_at_the_end_of_a_round_whatever_the_fragments(world, hvd_nodes):
    model = make_model()
    optimizer = plain_sgd(model)
    method = hvd_nodes.DiLoCo(model, optimizer, "auto", fragments=3, most=24)
    train(hvd_nodes, model, optimizer, method, 0, 9)
    steps = method.facts["steps"]
    assert (method.facts["rounds"], len(set(world.allgather(steps)))) == (3, 1)
    assert 3 <= steps <= 24
    train(hvd_nodes, model, optimizer, method, 9, 9 + steps)
    assert method.facts["rounds"] == 4
    method.close()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 6])
def test_parameters_are_divided_in_order_and_about_evenly(num_parts):
    named = list(make_model().named_parameters())
    parts = divided(named, num_parts)
    assert [name for part in parts for name in part] == [name for name, _ in named]
    assert len(parts) == num_parts
    assert all(parts)
