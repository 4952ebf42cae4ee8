"""What local SGD promises: K ranks need a K-th of the steps, and few rounds are enough."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.nn.functional import softplus

from tests.gradients.training import digits


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("steps", [1, 8])
def test_the_error_falls_with_the_number_of_ranks(world, hvd_nodes, steps):
    """With steps a/t on x^2/2 and gradients of variance 1, T K E[x^2] -> a^2 / (2 a - 1)."""
    num_steps, dim, a = 256, 8000, 2.0
    model = nn.Linear(dim, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: a / (step + 2 * a))
    noise = torch.Generator().manual_seed(world.rank)
    with hvd_nodes.LocalSGD(model, optimizer, steps):
        for _ in range(num_steps):
            gradient = torch.randn(1, dim, generator=noise, dtype=torch.float64)
            model.weight.grad = model.weight.detach() + gradient
            optimizer.step()
            rate.step()
    error = model.weight.detach().square().mean().item()
    assert error * num_steps * world.size == pytest.approx(a**2 / (2 * a - 1), rel=0.15)


class Logistic:
    """Digits below 5 against the others: the loss over all of them, and how far a model is off."""

    decay = 0.01

    def __init__(self) -> None:
        images, labels = digits()
        self.images = images - images.mean(dim=0)
        self.signs = (labels < 5).double() * 2 - 1
        with_ones = np.hstack([self.images.numpy(), np.ones((len(images), 1))])
        signs = self.signs.numpy()

        def loss(w):
            slopes = -signs / (1 + np.exp(signs * (with_ones @ w)))
            value = np.logaddexp(0, -signs * (with_ones @ w)).mean()
            gradient = (with_ones * slopes[:, None]).mean(axis=0)
            return value + self.decay / 2 * w @ w, gradient + self.decay * w

        self._loss = loss
        options = {"maxiter": 10_000, "ftol": 1e-15, "gtol": 1e-10}
        found = minimize(loss, np.zeros(65), jac=True, method="L-BFGS-B", options=options)
        self.least = found.fun

    def excess(self, model: nn.Module) -> float:
        """Return the loss over the smallest one."""
        weights = torch.cat([model.weight.detach()[0], model.bias.detach()])
        return self._loss(weights.numpy())[0] - self.least

    def steps_to(self, hvd, excess: float, lr: float, steps: int, most: int) -> tuple[int, int]:
        """Return the steps, counted in sixteens, and the rounds until the loss is near enough."""
        model = nn.Linear(64, 1).double()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=self.decay)
        choice = torch.Generator().manual_seed(100 + hvd.rank())
        with hvd.LocalSGD(model, optimizer, steps) as method:
            for step in range(1, most + 1):
                own = torch.randint(len(self.images), (2,), generator=choice)
                optimizer.zero_grad()
                outputs = model(self.images[own])[:, 0]
                softplus(-self.signs[own] * outputs).mean().backward()
                optimizer.step()
                if step % 16 == 0 and self.excess(model) < excess:
                    return step, method.facts["rounds"]
        return most, method.facts["rounds"]


@pytest.mark.ranks(2, 4)
def test_four_steps_per_round_need_as_many_steps_and_a_quarter_of_the_rounds(hvd_nodes):
    problem = Logistic()
    found = {}
    for steps in (1, 4):
        runs = [problem.steps_to(hvd_nodes, 0.01, lr, steps, most=480) for lr in (0.2, 0.3, 0.4)]
        found[steps] = min(runs)
    (steps_1, rounds_1), (steps_4, rounds_4) = found[1], found[4]
    assert steps_1 < 480
    assert steps_4 <= 1.15 * steps_1
    assert rounds_1 == steps_1
    assert rounds_4 * 4 == steps_4
