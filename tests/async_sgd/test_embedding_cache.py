"""Check cached rows of other nodes: their age, their invalidation, and their savings."""

import copy

import numpy as np
import pytest
import torch

import hpctrain as hvd
from hpctrain.async_sgd.sharded_embedding_cache import RowCache
from hpctrain.async_sgd.sharded_embedding_rules import RowSGD
from hpctrain.core.errors import MismatchError
from hpctrain.runtime.world import current

ROWS, DIM, STEPS = 60, 2, 30
SIZES = pytest.mark.ranks(2, 3, 4)


def make_table(**options):
    how = {"lr": 1.0, "dtype": torch.float64, "init": 0.0, "optimizer": "sgd", **options}
    return hvd.ShardedEmbedding(ROWS, DIM, **how)


def rows_of(table):
    """Return all rows by id, read from the owners of the rows. Collective."""
    own = table.sharded_state()["tensors"]["rows"]
    parts = current().comm.allgather_object((own.shard.offset[0], own.tensor.clone()))
    rows = torch.cat([values for _, values in sorted(parts, key=lambda part: part[0])])
    return rows[torch.arange(ROWS) * table._spread.factor % ROWS]


def ids_of(step, num=20):
    """Return ids of this rank: some are frequent, and sometimes there are none."""
    random = np.random.default_rng([step, hvd.rank()])
    ids = random.integers(0, ROWS, num if random.random() < 0.8 else 0)
    return torch.from_numpy(np.where(ids % 2, ids % 7, ids))


def step_once(table, ids):
    """Step with gradients that are never zero and differ between steps."""
    (table(ids) * (table.steps + 1 + hvd.rank() / 10)).sum().backward()
    table.step()


class Broken(RowSGD):
    """An update rule that fails on rank 0."""

    def step(self, rows, grads, state, step):
        super().step(rows, grads, state, step)
        if hvd.rank() == 0:
            raise RuntimeError("broken")


def write(table, _):
    """Change rows of the table on one rank."""
    if hvd.rank() == hvd.size() - 1:
        table.sharded_state()["tensors"]["rows"].tensor.add_(0.5)
    return [rows_of(table)]


def load(table, state):
    """Load an earlier state."""
    table.load_sharded_state(state)
    return [rows_of(table)]


def fail(table, _):
    """Take a step that fails on one rank, raises on all, and may change rows."""
    rule, table._rule = table._rule, Broken(1.0)
    table(torch.arange(ROWS)[hvd.rank() :: 3]).sum().backward()
    with pytest.raises(MismatchError, match="broken"):
        table.step()
    table._rule = rule
    return [rows_of(table)]


CHANGES = {7: write, 13: load, 19: fail}


@pytest.mark.usefixtures("hvd_nodes")
@SIZES
@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_no_copy_is_older_than_cache_steps_or_than_a_change_of_rows(max_age):
    """Each row that is read equals a row of its owner within ``max_age`` steps."""
    table = make_table(cache_rows=12, cache_steps=max_age)
    had, oldest, state = [rows_of(table)], 0, None
    step_once(table, torch.arange(ROWS))
    had.append(rows_of(table))
    for step in range(STEPS):
        if step == 4:
            state = copy.deepcopy(table.sharded_state())
        if step in CHANGES:
            had = [*(had if CHANGES[step] is fail else []), *CHANGES[step](table, state)]
        table.train(step % 5 > 0 or hvd.rank() > 0)  # one rank in evaluation mode is sufficient
        allowed = max_age if step % 5 else 0
        for number in range(2):  # the second lookup uses copies of the first
            ids = ids_of(step + 50 * number)
            found = table(ids).detach()
            ages = [
                next((age for age, rows in enumerate(had[::-1]) if rows[i].equal(row)), STEPS)
                for i, row in zip(ids.tolist(), found, strict=True)
            ]
            age = max(current().comm.allgather_object(max(ages, default=0)))
            assert age <= allowed
            oldest = max(oldest, age)
        if step % 6 == 0:
            table.step()  # without gradients: the step count is unchanged
        taken = table.steps
        step_once(table, ids_of(step + 100))
        had += [rows_of(table)] * (table.steps - taken)
    assert oldest == max_age


@pytest.mark.usefixtures("hvd_nodes")
@SIZES
def test_rows_reset_by_their_owner_are_not_read_from_the_cache():
    table, ids = make_table(cache_rows=ROWS), torch.arange(ROWS)
    step_once(table, ids)
    before = table(ids).detach()
    if hvd.rank() == hvd.size() - 1:
        table.sharded_state()["tensors"]["is_stored"].tensor.zero_()
    hvd.barrier()
    every = current().comm.allgather_object(table(ids).detach())
    assert all(found.equal(every[-1]) for found in every)
    assert not every[0].equal(before)


@pytest.mark.usefixtures("hvd_nodes")
@pytest.mark.ranks(1, 2, 3, 4)
def test_row_is_sent_once_per_cache_age_and_savings_are_reported():
    """Each node reads the rows of the others, so that all are sent once; none on one node."""
    table, num = make_table(cache_rows=ROWS, cache_steps=2), ROWS * (hvd.size() > 1)
    for _ in range(6):
        table(torch.arange(ROWS))
        step_once(table, torch.arange(ROWS))
    total, *by_rank = table.cache_report()
    assert total == (12 * num, 10 * num, 10 * num * (8 + 8 * DIM))
    assert total.hit_rate == pytest.approx(10 / 12 if num else 0)
    assert total == tuple(map(sum, zip(*by_rank, strict=True)))
    assert len(by_rank) == hvd.size()
    with torch.no_grad():
        table.eval()(torch.arange(ROWS))
        assert table.cache_report()[0].hits == 10 * num  # no copy of an earlier step


@pytest.mark.ranks(1)
def test_frequent_row_is_kept_among_rows_of_the_same_slot():
    cache = RowCache(10, 1000, 1, torch.float64)
    hits = 0
    for step in range(100):
        rows = np.array([3, 14, *range(20 + 10 * step, 26 + 10 * step)])
        rows = rows[step % 4 == 0 :]  # row 3 occurs in three of four steps
        is_hit = cache.find(rows, [], exact=False)
        found = cache.join(rows, is_hit, torch.from_numpy(rows[~is_hit, None] * 1.0))
        assert found[:, 0].tolist() == rows.tolist()
        hits += is_hit[rows < 20].sum()
    assert hits > 0.95 * (75 + 100)
