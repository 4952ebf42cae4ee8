"""``DiLoCo``: equivalences, outer steps, fragments, delays and memory."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.local_sgd.diloco import divided
from tests.gradients.training import global_batch, make_model, part_of
from tests.local_sgd.local_methods import Run, weights_of

SIZES = pytest.mark.ranks(1, 2, 4)
MANY = pytest.mark.ranks(2, 3, 4)


def plain_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@SIZES
@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_with_one_inner_step_it_is_synchronous_or_nesterov_sgd(hvd_nodes, mu):
    outer = {"outer_lr": 1.0, "outer_momentum": mu}
    found = Run(hvd_nodes, "DiLoCo", 1, optimizer=plain_sgd, **outer).end(12)
    model = make_model()
    options = {"momentum": mu, "nesterov": True} if mu else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **options)
    for step in range(12):
        images, labels = global_batch(step)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.testing.assert_close(found, weights_of(model), rtol=0, atol=1e-13)


@SIZES
def test_without_an_outer_optimizer_it_is_local_sgd(hvd_nodes):
    local = Run(hvd_nodes, "LocalSGD", 4).end(12)
    found = Run(hvd_nodes, "DiLoCo", 4, outer_lr=1.0, outer_momentum=0.0).end(12)
    torch.testing.assert_close(found, local, rtol=0, atol=1e-13)


class Streaming:
    """Reference of fragments and delays with all ranks in one process, following the paper."""

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
        """Apply all updates in flight, then send and apply the fragments with new steps."""
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
def test_fragments_and_delays_are_those_of_the_paper(
    world, hvd_nodes, fragments, delay, keep, num_steps
):
    """``finish`` takes no second outer step for a fragment that has not changed."""
    options = {"fragments": fragments, "delay": delay, "keep": keep}
    run = Run(hvd_nodes, "DiLoCo", 6, optimizer=plain_sgd, **options).to(num_steps)
    parts = divided(list(make_model().named_parameters()), fragments)
    expected = Streaming(world.size, 6, parts, delay, keep).train(num_steps)

    def is_outer():
        outer = torch.cat([expected.outer[n].reshape(-1) for n, _ in run.model.named_parameters()])
        torch.testing.assert_close(run.weights, outer, rtol=0, atol=1e-13)

    own = weights_of(expected.models[world.rank])
    torch.testing.assert_close(run.weights, own, rtol=0, atol=1e-13)
    with run.method.averaged():
        is_outer()
    expected.end(num_steps)
    run.method.finish()
    is_outer()
    after = run.weights.clone()
    run.method.finish()
    assert torch.equal(after, run.weights)
    run.method.close()


@pytest.mark.ranks(4)
def test_each_node_stores_the_outer_model_once(world, hvd_nodes):
    run = Run(hvd_nodes, "DiLoCo", 4)
    held = [
        vector.own.nbytes
        for part in run.method._exchange._anchored
        for vector in (*part._anchors, *part._momenta)
    ]
    of_node = sum(world.allgather(sum(held))) / 2
    once = 2 * sum(p.nbytes for p in run.model.parameters())
    assert once <= of_node <= 1.1 * once


@MANY
def test_a_round_without_participants_changes_nothing(world, hvd_nodes):
    run = Run(hvd_nodes, "DiLoCo", 2, optimizer=plain_sgd)
    run.method.take_part(takes_part=False)
    assert run.to(2).num_kinds(world) == world.size
    assert not run.method.rounds.agrees
    run.method.take_part(takes_part=True)
    assert run.to(4).num_kinds(world) == 1
    run.method.close()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 6])
def test_parameters_are_divided_in_order_into_nonempty_fragments(num_parts):
    named = list(make_model().named_parameters())
    parts = divided(named, num_parts)
    assert [name for part in parts for name in part] == [name for name, _ in named]
    assert len(parts) == num_parts
    assert all(parts)
