"""Random sequences of calls of local methods equal a reference with all replicas in one process.

Each rank computes the reference itself, with its own means and outer steps.
"""

import copy
import os
import random
import time

import pytest
import torch
from torch import nn

from hpctrain.local_sgd.averaging import NodeVector

NUM_SEQUENCES = int(os.environ.get("TEST_SEQUENCES", "2"))
NUM_CALLS = 40
STEPS = 3
MAKERS = {
    "LocalSGD": lambda hvd, m, o: hvd.LocalSGD(m, o, STEPS),
    "LocalSGD, reset": lambda hvd, m, o: hvd.LocalSGD(m, o, STEPS, state="reset"),
    "DiLoCo": lambda hvd, m, o: hvd.DiLoCo(m, o, STEPS, outer_lr=0.5, outer_momentum=0.8),
}


class Replicas:
    """Reference: the replicas of all ranks in one process."""

    def __init__(self, model, size, name):
        self.models = [copy.deepcopy(model) for _ in range(size)]
        self.optimizers = [sgd(one) for one in self.models]
        self.samples, self.name, self.in_round, self.number = [0.0] * size, name, 0, 0
        self.outer = copy.deepcopy(model)
        self.outer_optimizer = torch.optim.SGD(
            self.outer.parameters(), lr=0.5, momentum=0.8, nesterov=True
        )

    def step(self, rank, rows):
        """Take a step of one replica, unless ``rows`` is empty."""
        self.samples[rank] += len(rows or ())
        if rows:
            self.optimizers[rank].zero_grad()
            loss_of(self.models[rank], rows).backward()
            self.optimizers[rank].step()

    def mean(self):
        weights = self.samples if sum(self.samples) else [1.0] * len(self.samples)
        columns = zip(*(one.parameters() for one in self.models), strict=True)
        return [
            sum(w * p.detach() for w, p in zip(weights, column, strict=True)) / sum(weights)
            for column in columns
        ]

    def end_step(self):
        self.in_round += 1
        if self.in_round == STEPS:
            self.end_round(is_last=False)

    def end_round(self, *, is_last):
        """Replace all models by the mean; without samples only in the last round, unweighted."""
        if (is_last and not self.in_round) or not (is_last or sum(self.samples)):
            self.in_round = 0
            return
        with torch.no_grad():
            mean = self.mean()
            if self.name == "DiLoCo":
                for p, value in zip(self.outer.parameters(), mean, strict=True):
                    p.grad = p - value
                self.outer_optimizer.step()
                mean = [p.detach() for p in self.outer.parameters()]
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                for p, value in zip(model.parameters(), mean, strict=True):
                    p.copy_(value)
                if self.name.endswith("reset"):
                    optimizer.state.clear()
        self.samples, self.in_round = [0.0] * len(self.samples), 0


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def loss_of(model, rows):
    return model(torch.tensor(rows, dtype=torch.float64)[:, None]).square().mean()


class Sequence:
    """Calls drawn from a seed, identical on all ranks."""

    def __init__(self, hvd, name, seed):
        self.hvd, self.draw, self.name = hvd, random.Random(f"{name} {seed}"), name
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.known = Replicas(self.model, hvd.size(), name)
        self.optimizer = sgd(self.model)
        self.method = MAKERS[name](hvd, self.model, self.optimizer)
        self.saved, self.story = None, []

    def run(self):
        calls = [*["step"] * 8, "step", "save", "load", "averaged", "finish"]
        with self.method:
            for _ in range(NUM_CALLS):
                self.story.append(self.draw.choice(calls))
                getattr(self, self.story[-1])()
                self.compare(self.known.models[self.hvd.rank()].parameters())
        self.known.end_round(is_last=True)
        self.compare(self.known.models[0].parameters())

    def step(self):
        """Take a step; ranks without samples or with a failed backward skip it."""
        size = self.hvd.size()
        for rank in range(size):
            what = self.draw.choice(["samples", "samples", "samples", "none", "raises"])
            what = "samples" if rank == 0 and self.draw.random() < 0.8 else what
            rows = [self.draw.random() for _ in range(self.draw.randrange(1, 4))]
            self.known.step(rank, rows if what == "samples" else None)
            if rank == self.hvd.rank():
                self.own_step(what, rows)
        self.known.end_step()

    def own_step(self, what, rows):
        self.optimizer.zero_grad()
        # The number is set on all ranks, also on those that skip the step afterwards.
        self.method.set_num_samples(0 if what == "none" else len(rows), nominal=2)
        if what == "samples":
            loss_of(self.model, rows).backward()
            self.optimizer.step()
            return
        if what == "raises":
            loss = loss_of(self.model, rows)
            handle = self.model[0].weight.register_hook(_break)
            with pytest.raises(InterruptedError):
                loss.backward()
            handle.remove()
        self.method.skip_step()

    def save(self):
        own = self.model.state_dict(), self.optimizer.state_dict(), self.method.state_dict()
        self.saved = copy.deepcopy((own, self.known))

    def load(self):
        """Load the saved state into the same objects, also within a round."""
        if self.saved:
            self.method.set_num_samples(5, nominal=2)  # for a step that is not taken
            own, self.known = copy.deepcopy(self.saved)
            for one, state in zip((self.model, self.optimizer, self.method), own, strict=True):
                one.load_state_dict(state)

    def averaged(self):
        if not self.known.in_round:
            return
        outer = [p.detach() for p in self.known.outer.parameters()]
        with self.method.averaged():
            self.compare(outer if self.name == "DiLoCo" else self.known.mean())

    def finish(self):
        self.method.finish()
        self.known.end_round(is_last=True)

    def compare(self, expected):
        for one, other in zip(self.model.parameters(), expected, strict=True):
            text = f"{self.name}: {self.story}"
            torch.testing.assert_close(
                one.detach(), other.detach(), rtol=1e-9, atol=1e-12, msg=lambda m, t=text: t + m
            )


def _break(_):
    raise InterruptedError


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", MAKERS)
def test_random_calls_equal_replicas_in_one_process(hvd_nodes, name):
    for seed in range(NUM_SEQUENCES):
        Sequence(hvd_nodes, name, seed).run()


@pytest.mark.ranks(3, 4)
def test_a_state_is_loaded_only_after_all_ranks_have_read_the_outer_model(hvd_nodes, monkeypatch):
    """Ranks of a node share the outer model, so a load must wait for the slowest reader."""
    sequence = Sequence(hvd_nodes, "DiLoCo", 0)
    sequence.save()
    read = NodeVector.read

    def read_late(vector, out):
        time.sleep(0.1)
        read(vector, out)

    if hvd_nodes.rank() == 0:
        monkeypatch.setattr(NodeVector, "read", read_late)
    for _ in range(STEPS):
        sequence.own_step("samples", [0.1])
    after_round = [p.detach().clone() for p in sequence.model.parameters()]
    sequence.method.load_state_dict(sequence.saved[0][2])
    for values in hvd_nodes.allgather_object(after_round):
        for one, other in zip(after_round, values, strict=True):
            assert torch.equal(one, other)
    sequence.method.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", MAKERS)
def test_a_shared_state_starts_a_round_without_earlier_samples(hvd_nodes, name):
    """Counts of samples start at 0, and ``DiLoCo`` has the outer model of the state."""
    sequence = Sequence(hvd_nodes, name, 0)
    model, method, rank = sequence.model, sequence.method, hvd_nodes.rank()
    sequence.own_step("samples", [0.1] * (1 + rank))
    shared = copy.deepcopy(method.shared_state())
    outer = [p.detach().clone() for p in sequence.known.outer.parameters()]
    sequence.own_step("samples", [0.7] * (1 + 4 * rank))
    hvd_nodes.broadcast_parameters(model.state_dict())
    method.set_num_samples(3 * rank, nominal=2)  # for a step that is not taken
    method.load_shared_state(shared)
    with method.averaged():
        sequence.compare(outer if name == "DiLoCo" else [p.detach() for p in model.parameters()])
    sequence.own_step("samples", [0.2 + rank])  # one sample on each rank
    means = [hvd_nodes.allreduce(p.detach(), op=hvd_nodes.Average) for p in model.parameters()]
    if name != "DiLoCo":
        with method.averaged():
            sequence.compare(means)
    method.close()
