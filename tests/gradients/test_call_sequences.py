"""Check that public calls in any order, some interrupted, train as one plain process does."""

import copy
import itertools
import os
import random
import warnings

import pytest
import torch
from torch import nn

from hpctrain.core.errors import MismatchError
from tests.gradients.test_sharded_step import backward, batch, make_model, wrapped
from tests.gradients.training import ONE_NODE, OVERLAPS

pytestmark = ONE_NODE
NUM_SEQUENCES = int(os.environ.get("TEST_SEQUENCES", "1"))
"""Number of sequences for each kind and each method of sending gradients."""
NUM_CALLS = 40
FOUND = {"node": (17, 24)}  # seeds that have failed before
KINDS = {
    "average": {},
    "two passes": {"backward_passes_per_step": 2},
    "sum": {"op": "Sum"},
    "groups": {"groups": 2},
    "sparse": {},
    "sparse sum": {"op": "Sum"},
    "sparse as dense": {"sparse_as_dense": True},
    "adasum": {"op": "Adasum"},
    "node": {"shard": "node"},
}


class Model(nn.Module):
    """Define a model with rows and layers; some losses reach only one of the two."""

    def __init__(self, is_sparse):
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=is_sparse)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 1)
        self.breaks = False

    def forward(self, rows, part):
        hidden = self.table(rows)
        if part == "rows":
            return hidden.square().sum(1)
        hidden = self.first(hidden if part == "all" else hidden.detach())
        if self.breaks:  # in the middle of backward: one layer already has its gradients
            hidden.register_hook(_break)
        return self.second(hidden.tanh()).square()


def _break(_):
    raise InterruptedError


class Sequence:
    """Draw calls from a seed, the same on all ranks, and run them here and on a plain model."""

    def __init__(self, hvd, kind, seed):
        self.hvd, self.kind, self.draw = hvd, kind, random.Random(f"{kind} {seed}")
        options = dict(KINDS[kind])
        options["op"] = getattr(hvd, options.get("op", "Average"))
        self.passes = options.get("backward_passes_per_step", 1)
        self.sums, self.is_alike = options["op"] is hvd.Sum, kind == "adasum"
        torch.manual_seed(3)
        self.model = Model(kind.startswith("sparse")).double()
        self.plain = copy.deepcopy(self.model)
        make = lambda m: torch.optim.SGD(m.parameters(), lr=0.05)  # noqa: E731
        if not kind.startswith("sparse"):
            make = lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5)  # noqa: E731
        self.optimizer = hvd.DistributedOptimizer(
            make(self.model), self.model.named_parameters(), **options
        )
        self.alone = make(self.plain)
        self.has_backward, self.is_clear, self.saved = False, True, None
        self.may_stay = False  # keep gradients set to equal values
        self.story = []

    def run(self):
        for _ in range(NUM_CALLS):
            name = self.draw.choice(self.possible())
            self.story.append(name)
            try:
                getattr(self, name)()
                self.compare()
            except Exception as error:
                raise AssertionError(f"{self.kind}: {self.story}") from error
        self.zero()
        self.step()
        self.compare()

    def possible(self):
        """Return the names of the calls that are allowed at this point."""
        calls = ["zero", "save", "thaw", "freeze", "load", "interrupted"]
        calls += ["by_hand"] * (not self.may_stay)
        calls += ["pass_left_over"] * 4 * (self.passes > 1)
        if self.has_backward:
            return [*["step"] * 3, "clip_value", "clip_norm", "synchronized_step", "zero"]
        return [*calls, *["backward"] * 8, *(["step"] if self.kind != "node" else [])]

    # Calls

    def backward(self):
        for _ in range(self.passes):
            # With several passes, each must reach a trained parameter; otherwise it does not
            # count.
            parts = ["all", "all", "layers", "rows"] if self.passes == 1 else ["all"]
            self._backward(self.draw.choice(parts))

    def pass_left_over(self):
        """Run one of two passes, then discard its gradients, restore a state, or step."""
        self.zero(is_none=True)
        what = self.draw.choice(["zero", "load", "step"])
        self._backward("all")
        if what == "load":
            self.optimizer.load_state_dict(self.optimizer.state_dict())
            self.alone.load_state_dict(self.alone.state_dict())
            for model in (self.model, self.plain):
                model.zero_grad()
            self.is_clear = True
            self.backward()
        if what == "step":
            self.step()
        if what != "load":
            self.zero(is_none=True)

    def by_hand(self):
        """Set equal gradients on all ranks, in a step without backward."""
        self.zero(is_none=True)
        share = self.hvd.size() if self.sums else 1
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            if p.requires_grad:
                p.grad, q.grad = torch.full_like(p, 0.1), torch.full_like(q, 0.1 * share)
        if not (self.sums or self.is_alike):
            self.optimizer.set_num_samples(2, nominal=2)
        self.step()
        self.zero(is_none=True)

    def _backward(self, part):
        """Run backward; ranks without samples skip it or produce NaN."""
        size, is_weighted = self.hvd.size(), not (self.sums or self.is_alike)
        counts = [self.draw.randrange(3) for _ in range(size)] if self.passes == 1 else [2] * size
        counts[self.draw.randrange(size)] = 2
        rows = [[self.draw.randrange(7) for _ in range(2)] for _ in range(size)]
        how = [self.draw.choice(["none", "nan"]) for _ in range(size)]
        if not is_weighted:
            counts = [2] * size
        if self.is_alike:
            rows = [rows[0]] * size
        if any(p.requires_grad for p in self.reached(part)):
            own = torch.tensor(rows[self.hvd.rank()])
            if is_weighted:
                self.optimizer.set_num_samples(counts[self.hvd.rank()], nominal=2)
            if counts[self.hvd.rank()]:
                self.model(own, part).mean().backward()
            elif how[self.hvd.rank()] == "nan" or not self.is_clear:
                (self.model(own, part).mean() * float("nan")).backward()
            else:
                self.optimizer.synchronize()
            losses = [self.plain(torch.tensor(each), part).mean() for each in rows]
            total = 1 if self.sums else size if self.is_alike else sum(counts)
            weights = [1] * size if self.sums or self.is_alike else counts
            sum(w / total * loss for w, loss in zip(weights, losses, strict=True)).backward()
            lone = [not n and one == "none" for n, one in zip(counts, how, strict=True)]
            is_waiting = self.kind == "node" and self.is_clear and any(lone)
            self.has_backward, self.is_clear, self.may_stay = True, False, True
            if is_waiting:  # in synchronize(), for the step of the other ranks
                self.step()

    def reached(self, part):
        layers = [*self.model.first.parameters(), *self.model.second.parameters()]
        rows = [*self.model.table.parameters()]
        return {"all": [*rows, *layers], "layers": layers, "rows": rows}[part]

    def interrupted(self):
        """Let backward raise on all ranks; discard its gradients."""
        self.zero(is_none=True)
        rows, part = torch.tensor([self.draw.randrange(7)]), self.draw.choice(["all", "layers"])
        if any(p.requires_grad for p in self.model.second.parameters()) and any(
            p.requires_grad for p in self.model.first.parameters()
        ):
            self.model.breaks = True
            with pytest.raises(InterruptedError):
                self.model(rows, part).mean().backward()
            self.model.breaks = False
            self.optimizer.load_state_dict(self.optimizer.state_dict())
            self.model.zero_grad()
        if self.draw.random() < 0.5:
            self.step()
        self.zero(is_none=True)

    def zero(self, *, is_none=None):
        is_none = self.draw.random() < 0.7 if is_none is None else is_none
        self.optimizer.zero_grad(set_to_none=is_none)
        self.alone.zero_grad(set_to_none=is_none)
        self.has_backward, self.is_clear = False, True

    def step(self):
        self.optimizer.step()
        self.alone.step()
        self.has_backward = self.may_stay = False
        if self.kind == "node":  # clipped gradients must not be kept with shard=node
            self.zero()

    def synchronized_step(self):
        if self.kind == "adasum":
            self.step()
            return
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.alone.step()
        self.has_backward = self.may_stay = False
        if self.kind == "node":
            self.zero()

    def clip_value(self):
        if self.kind.startswith("sparse"):
            return
        bound = self.draw.choice([0.01, 1.0])
        self.optimizer.clip_grad_value_(bound)
        nn.utils.clip_grad_value_(self.plain.parameters(), bound)

    def clip_norm(self):
        if self.kind.startswith("sparse"):
            return
        bound = self.draw.choice([0.05, 10.0])
        found = self.optimizer.clip_grad_norm_(bound)
        torch.testing.assert_close(found, nn.utils.clip_grad_norm_(self.plain.parameters(), bound))

    def freeze(self):
        self._require_grad(is_trained=False)

    def thaw(self):
        self._require_grad(is_trained=True)

    def _require_grad(self, *, is_trained):
        self.zero()
        name = self.draw.choice(["table", "first", "second"])
        for model in (self.model, self.plain):
            getattr(model, name).requires_grad_(is_trained)

    def save(self):
        self.saved = [
            copy.deepcopy(one.state_dict())
            for one in (self.model, self.optimizer, self.plain, self.alone)
        ]

    def load(self):
        """Restore the saved state; keep the gradients."""
        if self.saved:
            for one, state in zip(
                (self.model, self.optimizer, self.plain, self.alone), self.saved, strict=True
            ):
                one.load_state_dict(copy.deepcopy(state))
        if self.kind == "node":
            self.zero()

    # Comparison

    def compare(self):
        for (name, p), q in zip(
            self.model.named_parameters(), self.plain.parameters(), strict=True
        ):
            text, close = f"{name} differs", {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(p.detach(), q.detach(), **close)
            if self.kind == "node":
                continue  # gradients differ between ranks
            assert (p.grad is None) == (q.grad is None), text
            if p.grad is not None:
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense(), **close)


@pytest.mark.ranks(1, 2, 3)
@OVERLAPS
@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_any_order_train_as_one_process_does(hvd, kind):
    warnings.simplefilter("ignore")
    for seed in (*range(NUM_SEQUENCES), *FOUND.get(kind, ())):
        sequence = Sequence(hvd, kind, seed)
        sequence.run()
        alike = hvd.allgather_object([p.detach() for p in sequence.model.parameters()])
        for other in alike[1:]:
            assert all(map(torch.equal, alike[0], other))


@pytest.mark.ranks(2, 3)
@OVERLAPS
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize(
    ("clears", "what"),
    # Only the optimizer can notice that a sum was replaced.
    [*itertools.product(["model", "optimizer"], ["raises", "loads"]), ("optimizer", "replaced")],
)
def test_passes_restart_after_gradients_are_cleared(hvd, op, clears, what):
    """Discard one pass of two if the second raises, a sum was replaced, or state was loaded."""
    model = Model(is_sparse=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, op=getattr(hvd, op), backward_passes_per_step=2
    )
    hvd.broadcast_parameters(model.state_dict())
    rows = torch.tensor([hvd.rank()])
    for _ in range(2):
        model(rows, "all").sum().backward()
    optimizer.step()
    if what == "replaced":
        model.second.bias.grad = torch.ones_like(model.second.bias)
    else:
        optimizer.zero_grad()
    model(rows, "all").sum().backward()
    model.breaks = what == "raises"
    if model.breaks:
        with pytest.raises(InterruptedError):
            model(rows, "all").sum().backward()
        model.breaks = False
    if what == "loads":
        optimizer.load_state_dict(optimizer.state_dict())
    {"model": model, "optimizer": optimizer}[clears].zero_grad()
    plain = copy.deepcopy(model)
    for _ in range(2):
        model(rows, "all").sum().backward()
    share = hvd.size() if op == "Average" else 1
    for rank in range(hvd.size()):
        (2 / share * plain(torch.tensor([rank]), "all").sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
    optimizer.step()


@pytest.mark.ranks(2, 3)
def test_a_loaded_state_ends_the_error_of_a_replaced_sum(hvd):
    model, rows = Model(is_sparse=False).double(), torch.tensor([hvd.rank()])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    hvd.broadcast_parameters(model.state_dict())
    model(rows, "all").sum().backward()
    model.second.bias.grad = torch.ones_like(model.second.bias)
    with pytest.raises(MismatchError, match="was replaced on"):
        model(rows, "all").sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    model.zero_grad()
    plain = copy.deepcopy(model)
    model(rows, "all").sum().backward()
    plain(torch.arange(hvd.size()), "all").sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2, 3)
def test_frozen_layer_with_zero_gradients_is_equal_on_all_ranks(hvd):
    """Momentum moves the layer as in one process, although one rank had no gradient."""
    sgd = {"lr": 0.1, "momentum": 0.9}
    model, optimizer = wrapped(hvd, settings=sgd, shard="node")
    plain = make_model(torch.float64)
    alone = torch.optim.SGD(plain.parameters(), **sgd)
    counts = [0, *[1] * (hvd.size() - 1)]
    for step in range(3):
        if step == 1:
            for each in (model, plain):
                each[0].requires_grad_(requires_grad=False)
        optimizer.set_num_samples(counts[hvd.rank()])
        if counts[hvd.rank()]:
            backward(hvd, model, step)
        for rank in range(1, hvd.size()):
            (plain(batch(hvd, step, torch.float64, rank)).square().mean() / sum(counts)).backward()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad(set_to_none=False)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-12)
