"""Learning rates: scaling with the batch, schedules, and convergence as in theory."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR

from hpctrain.core.errors import ConfigError
from hpctrain.optim import LARS, InverseTimeLR, linear_scaling, square_root_scaling

NUM_RUNS = 4000


def test_rates_scale_linearly_or_with_the_square_root_of_the_batch():
    assert 0.1 * linear_scaling(256, 8192) == pytest.approx(3.2)
    assert 0.1 * square_root_scaling(256, 1024) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"batch sizes must be above 0, got \(0, 8\)"):
        linear_scaling(0, 8)


def test_inverse_time_resumes_from_its_state_and_rejects_invalid_arguments():
    found = []
    for pause in (False, True):
        optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=3.0)
        schedule = InverseTimeLR(optimizer, 4, decay=2.0)
        rates = []
        for step in range(8):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            if pause and step == 3:
                state, rate = schedule.state_dict(), optimizer.param_groups[0]["lr"]
                optimizer.param_groups[0]["lr"] = 3.0
                schedule = InverseTimeLR(optimizer, 1, decay=0.0)
                schedule.load_state_dict(state)
                optimizer.param_groups[0]["lr"] = rate
        found.append(rates)
    assert found[0] == found[1] == pytest.approx([3 / (1 + step / 2) for step in range(8)])
    for options in ({"num_steps": 0}, {"num_steps": 3, "decay": -1.0}):
        with pytest.raises(ConfigError, match="must be at least"):
            InverseTimeLR(optimizer, **options)


# -- stochastic approximation: minimize x^2 / 2 with gradients x + noise of variance 1 --


def mean_squares(optimizer_of_points, schedule_of, num_steps, *, start, batch=1):
    """Return x^2 after each step, averaged over runs."""
    random = torch.Generator().manual_seed(0)
    points = torch.full((NUM_RUNS,), start, dtype=torch.float64, requires_grad=True)
    optimizer = optimizer_of_points([points])
    schedule = schedule_of(optimizer)
    found = torch.empty(num_steps, dtype=torch.float64)
    for step in range(num_steps):
        noise = torch.randn(NUM_RUNS, generator=random, dtype=torch.float64) / batch**0.5
        points.grad = points.detach() + noise
        optimizer.step()
        schedule.step()
        found[step] = points.detach().square().mean()
    return found


@pytest.mark.parametrize("a", [0.4, 1.0, 2.0])
def test_rates_a_over_t_converge_as_in_robbins_and_monro(a):
    steps = 2000
    found = mean_squares(
        lambda points: torch.optim.SGD(points, lr=a),
        lambda optimizer: InverseTimeLR(optimizer, steps, decay=steps),
        steps,
        start=1.0 if a > 0.5 else 10.0,
    )
    if a > 0.5:
        expected = a**2 / (2 * a - 1)
        four_sigma = 4 * expected * math.sqrt(2 / NUM_RUNS)
        assert float(steps * found[-1]) == pytest.approx(expected, abs=four_sigma)
    else:  # the initial value decays more slowly than the noise
        ends = math.log(float(found[-1] / found[99])), math.log(steps / 100)
        assert ends[0] / ends[1] == pytest.approx(-2 * a, abs=0.08)


@pytest.mark.parametrize(
    ("rate", "batch", "within"), [(0.4, 1, 0.02), (0.2, 1, 0.02), (0.1, 1, 0.02), (0.1, 4, 0.05)]
)
def test_constant_rates_converge_to_a_floor_inversely_proportional_to_the_batch(
    rate, batch, within
):
    steps = 400
    found = mean_squares(
        lambda points: LARS(points, lr=rate, momentum=0.0, adapt=False),
        lambda optimizer: ConstantLR(optimizer, 1.0),
        steps,
        start=0.0,
        batch=batch,
    )
    floor = rate / (2 - rate) / batch
    assert float(found[100:].mean()) == pytest.approx(floor, rel=within)
