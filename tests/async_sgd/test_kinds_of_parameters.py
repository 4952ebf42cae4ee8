"""Check parameters of any shape and dtype on servers."""

import os
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.gradients.training import MANY, ONE_NODE, TWO_NODES

PROGRAMS = int(os.environ.get("TEST_PROGRAMS", "8"))
"""Trainings that are drawn."""

DTYPES = (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = ("SGD", "SGD", "RMSprop", "ASGD", "Adam", "AdamW", "Adagrad", "NAdam", "Adamax")


class Program:
    """Draw a training: parameters of any shape and dtype, settings, samples, values."""

    def __init__(self, seed: int, size: int) -> None:
        draw = random.Random(seed)
        self.seed, self.size, self.num_steps = seed, size, 4
        dtypes = draw.choices(DTYPES, k=draw.choice((1, 1, 2)))
        self.specs = [(draw.choice(dtypes), self.shape(draw)) for _ in range(draw.randint(1, 4))]
        self.kind, self.options = draw.choice(KINDS), {"lr": draw.choice((0.1, 0.01))}
        self.options["weight_decay"] = draw.choice((0.0, 0.1))
        self.options["foreach"] = draw.choice((True, False))
        if self.kind in ("SGD", "RMSprop"):
            self.options["momentum"] = draw.choice((0.0, 0.9))
        if self.kind == "RMSprop":
            self.options["centered"] = draw.choice((True, False))
        self.counts = draw.choice((None, (1, 5, 7, 60), (0, 3, 60), (0,)))
        self.nominal = draw.choice((1, 1, 7))
        self.special = draw.choice((None, None, "nan", "inf", "-0.0", "large"))
        self.absent = draw.choice((0.0, 0.4))
        self.reloads = draw.choice((True, False))

    def shape(self, draw: random.Random) -> tuple[int, ...]:
        one = draw.choice((1, 5, 63, 64, 65, 200, 777, 1001))
        two = draw.randint(1, 40), draw.randint(1, 40)
        return draw.choice(((), (0, 3), (one,), (one,), two, two, (*two, 3, 3)))

    def __repr__(self) -> str:
        return str(vars(self))

    def model(self) -> nn.ParameterList:
        """Make parameters; tensors of two or four dimensions are not contiguous."""
        torch.manual_seed(self.seed)
        found = []
        for dtype, shape in self.specs:
            values = torch.randn(shape).to(dtype)
            if len(shape) == 2:
                values = values.t().contiguous().t()
            elif len(shape) == 4:
                values = values.to(memory_format=torch.channels_last)
            found.append(values)
        return nn.ParameterList(found)

    def steps(self, rank: int):
        """Yield the samples and gradients of a rank for each step; some gradients are None."""
        for step in range(self.num_steps):
            draw = random.Random(f"{self.seed} {step} {rank}")
            torch.manual_seed(draw.randrange(1 << 30))
            num_samples = draw.choice(self.counts) if self.counts else None
            gradients = [torch.randn(shape) for _, shape in self.specs]
            for grad in gradients:
                if self.special == "large":
                    grad.mul_(2e4).clamp_(-6e4, 6e4)  # sums exceed the range of float16
                elif self.special in ("nan", "inf") and num_samples != 0:
                    continue  # raises with servers
                elif self.special and grad.numel() and draw.random() < 0.5:
                    grad.view(-1)[draw.randrange(grad.numel())] = float(self.special)
            yield num_samples, [g if draw.random() >= self.absent else None for g in gradients]

    def train(self, hvd, *, ours: bool):
        """Take the steps, with or without servers; return parameters and state."""
        model = self.model()
        groups = [{"params": [p], "lr": 0.01 * (n + 1)} for n, p in enumerate(model)]
        optimizer = getattr(torch.optim, self.kind)(groups, **self.options)
        if ours:
            method = hvd.StaleSynchronous(model, optimizer, 0)
        else:
            method = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with method if ours else nullcontext():
            for step, (num_samples, gradients) in enumerate(self.steps(hvd.rank())):
                if num_samples is not None:
                    method.set_num_samples(num_samples, self.nominal)
                optimizer.zero_grad()
                pairs = zip(model, gradients, strict=True)
                if terms := [
                    (p * g.to(p.dtype)).sum().double() for p, g in pairs if g is not None
                ]:
                    sum(terms).backward()
                optimizer.step()
                schedule.step()
                if step == 1 and self.reloads:
                    with method.settled() if ours else nullcontext():
                        saved = optimizer.state_dict()
                    optimizer.load_state_dict(saved)
                    if ours:
                        method.reload()
        return [bits_of(p) for p in model], [
            {k: bits_of(v) for k, v in optimizer.state[p].items() if v is not None}
            for p in model
            if p.numel()
        ]


def bits_of(value):
    """Return the bits of numbers; all NaN count as equal."""
    flat = torch.as_tensor(value).detach().flatten()
    flat = torch.where(flat.isnan(), torch.full_like(flat, 99), flat)
    return flat.view(torch.uint8).tolist()


def check_programs(hvd, seeds) -> None:
    for seed in seeds:
        program = Program(seed, hvd.size())
        assert program.train(hvd, ours=True) == program.train(hvd, ours=False), program


@MANY
@ONE_NODE
def test_staleness_0_is_bitwise_equal_to_the_distributed_optimizer_for_any_training(hvd):
    check_programs(hvd, [44, *range(27, 26 + PROGRAMS)])  # 44 has a single number


@MANY
def test_staleness_0_is_bitwise_equal_on_two_nodes(hvd_nodes):
    check_programs(hvd_nodes, range(PROGRAMS))


@MANY
@TWO_NODES
@pytest.mark.parametrize("make", ["StaleSynchronous", "AsyncSGD", "Downpour"])
@pytest.mark.parametrize("numel", [0, 5])
def test_an_empty_parameter_may_be_the_only_one_of_its_dtype(hvd, make, numel):
    model = nn.ParameterList([torch.ones(numel), torch.ones(0, dtype=torch.float64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with getattr(hvd, make)(model, optimizer) as method:
        for _ in range(2):
            optimizer.zero_grad()
            sum(p.double().sum() for p in model).backward()
            optimizer.step()
        with method.settled():
            assert not model[1].numel()
    assert (model[0] < 1).all()
