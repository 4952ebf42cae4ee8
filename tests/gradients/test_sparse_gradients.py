"""Check that gradients of embeddings stay sparse and are averages."""

import pytest
import torch
from torch import nn

from tests.gradients.training import MANY, ONE_NODE, OVERLAPS

pytestmark = ONE_NODE
EITHER = pytest.mark.parametrize("as_dense", [False, True], ids=["gathered", "as dense"])


def make_table():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2)]).double()


def loss_of(model, rows):
    table, linear = model
    return linear(table(torch.tensor(rows))).square().sum() if rows else None


def rows_of(rank, step):
    return [(rank + step) % 5, 9, 9]


def distributed(hvd, model, as_dense, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = model.named_parameters()
    return hvd.DistributedOptimizer(optimizer, named, sparse_as_dense=as_dense, **options)


def assert_gradients(model, gradients):
    for p, exact in zip(model.parameters(), gradients, strict=True):
        assert p.grad.is_sparse is exact.is_sparse
        dense = (p.grad.to_dense(), exact.to_dense()) if exact.is_sparse else (p.grad, exact)
        torch.testing.assert_close(*dense, rtol=1e-12, atol=1e-14)


@MANY
@OVERLAPS
@EITHER
def test_sparse_gradients_are_averages_on_any_ranks_at_any_time(hvd, as_dense):
    """Cover one rank alone, a rank without samples, accumulated and late gradients."""
    for how in ("all", "one alone", "counted", "added up", "summed up", "later"):
        compare(hvd, as_dense, how)


def compare(hvd, as_dense, how):
    model, alone = make_table(), make_table()
    options = {"counted": {"gradient_predivide_factor": 2.0}, "summed up": {"op": hvd.Sum}}
    optimizer = distributed(hvd, model, as_dense, **options.get(how, {}))
    counted = {"one alone": [1], "counted": range(1, hvd.size())}.get(how, range(hvd.size()))
    num_parts = {"counted": len(counted), "summed up": 1}.get(how, hvd.size())
    for step in range(5):
        if how == "counted":
            optimizer.set_num_samples(0 if hvd.rank() == 0 else 2)
        if how == "later":
            model[0].sparse = step >= 2 and hvd.rank() == 0
        for one in (optimizer, alone) if not how.endswith("up") else ():
            one.zero_grad()
        if hvd.rank() == 1 or how != "one alone":
            loss_of(model, rows_of(hvd.rank(), step)).backward()
        if how != "all":
            optimizer.synchronize()
        for rank in counted:
            (loss_of(alone, rows_of(rank, step)) / num_parts).backward()
        exact = [p.grad for p in alone.parameters()]
        if how == "later" and step < 2:
            exact[0] = exact[0].to_dense()
        assert_gradients(model, exact)
        if how == "all":
            num_rows = model[0].weight.grad.coalesce().indices().numel()
            assert num_rows == len({row for r in counted for row in rows_of(r, step)})
    optimizer.zero_grad()


@MANY
@EITHER
def test_optimizers_for_sparse_gradients_step_on_every_rank(hvd, as_dense):
    table = nn.Embedding(10, 3, sparse=True)
    hvd.broadcast_parameters(table.state_dict())
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=as_dense)
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor(rows_of(hvd.rank(), step))).sum().backward()
        optimizer.step()
        assert torch.equal(hvd.broadcast(table.weight.detach(), 0), table.weight)


@MANY
@EITHER
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_gradient_that_is_kept_over_steps_is_reduced_once(hvd, is_sparse, as_dense):
    """No backward, or one that reaches other parameters, leaves the reduced gradient unchanged."""
    for op, share, groups in (
        (hvd.Sum, 1, None),
        (hvd.Sum, 1, 1),
        (hvd.Average, hvd.size(), None),
    ):
        model = make_table()
        table, layer = model
        table.sparse = is_sparse
        before = table.weight.detach().clone()
        optimizer = distributed(hvd, model, as_dense, op=op, groups=groups)
        counts = torch.zeros(10, 3, dtype=torch.float64)
        for row in (row for rank in range(hvd.size()) for row in rows_of(rank, 0)):
            counts[row] += 1.0 / share
        for step in range(3):
            if step == 0:
                table(torch.tensor(rows_of(hvd.rank(), 0))).sum().backward()
            elif step == 1:
                layer(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            optimizer.step()
            grad = table.weight.grad
            assert grad.is_sparse is is_sparse
            torch.testing.assert_close(grad.to_dense(), counts, rtol=1e-12, atol=1e-14)
        moved = before - 3 * 0.1 * counts
        torch.testing.assert_close(table.weight.detach(), moved, rtol=1e-12, atol=1e-14)
