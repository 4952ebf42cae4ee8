"""Check that a sharded embedding equals one process with the whole batch, for any lookups."""

import copy
import math
import pickle
import zlib

import pytest
import torch
from torch import nn

import hpctrain as hvd
from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.runtime.world import current
from tests.async_sgd.embedding_oracle import DIM, OPTIMIZERS, ROWS, copy_of, ids_of, model_of

SIZES = pytest.mark.ranks(1, 2, 3, 4)
MANY = pytest.mark.ranks(2, 4)


def make_table(hvd, optimizer="sgd", **options):
    """Make a table with a cache; the cache does not change results."""
    how = {"lr": 0.1, "dtype": torch.float64, "seed": 5, "cache_rows": 700, **options}
    return hvd.ShardedEmbedding(ROWS, DIM, optimizer=optimizer, **how)


def alone_of(table, optimizer, lr=0.1, **options):
    """Return a model of torch with the same rows, and its optimizers."""
    kind = nn.EmbeddingBag if "mode" in options else nn.Embedding
    whole = kind(ROWS, DIM, sparse=True, **options).double()
    with torch.no_grad():
        whole.weight.copy_(copy_of(table))
    model = model_of(whole)
    steps = [OPTIMIZERS[optimizer]([whole.weight], lr=lr)]
    return model, [*steps, torch.optim.SGD(model[1].parameters(), lr=0.1)]


def loss_of(model, ids):
    return model[1](model[0](ids)).square().mean()


def same_rows(table, whole):
    torch.testing.assert_close(copy_of(table), whole.weight.detach(), rtol=0, atol=1e-12)


@SIZES
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_ranks_take_the_step_of_one_process_with_the_joined_batch(hvd_nodes, optimizer):
    hvd = hvd_nodes
    model = model_of(make_table(hvd, optimizer))
    alone, steps = alone_of(model[0], optimizer)
    dense = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].step_with(dense)
    for step in range(5):
        dense.zero_grad()
        loss_of(model, ids_of(hvd.rank(), step)).backward()
        dense.step()
        for one in steps:
            one.zero_grad()
        loss_of(alone, torch.cat([ids_of(rank, step) for rank in range(hvd.size())])).backward()
        for one in steps:
            one.step()
    same_rows(model[0], alone[0])
    for mine, exact in zip(model[1].parameters(), alone[1].parameters(), strict=True):
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12)


@SIZES
def test_first_rows_do_not_depend_on_the_number_of_ranks(hvd_nodes):
    rows = copy_of(make_table(hvd_nodes, padding_idx=7))
    assert rows[7].tolist() == [0.0, 0.0, 0.0]
    assert zlib.crc32(rows.numpy().tobytes()) == 3664318126
    assert rows.min() >= -0.05
    assert rows.max() < 0.05
    assert abs(rows.mean()) < 1e-3
    assert rows.std() == pytest.approx(0.1 / 12**0.5, rel=0.02)
    other = copy_of(make_table(hvd_nodes, seed=6))
    assert (other != rows).float().mean() > 0.99


@SIZES
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_equal_torch_on_the_joined_batch(hvd_nodes, mode):
    hvd = hvd_nodes
    how = {"mode": mode, "padding_idx": 7}
    table, rows = make_table(hvd, **how), make_table(hvd, padding_idx=7)
    whole = nn.EmbeddingBag(ROWS, DIM, sparse=True, **how).double()
    with torch.no_grad():
        whole.weight.copy_(copy_of(rows))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)

    def bags_of(rank, step):
        """Return ids and offsets of bags: some are empty, some contain only padding."""
        ids = ids_of(rank, step, 9)
        ids[[0, 3, 4]] = 7
        return (ids, torch.tensor([0, 2, 2, 3, 5, 9])) if step else (ids.view(3, 3), None)

    for step in range(3):
        ids, offsets = bags_of(hvd.rank(), step)
        found = table(ids, offsets)
        with torch.no_grad():
            torch.testing.assert_close(found, whole(ids, offsets), rtol=0, atol=1e-12)
        found.square().sum().backward()
        table.step()
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            (whole(*bags_of(rank, step)).square().sum() / hvd.size()).backward()
        optimizer.step()
    ids = torch.arange(ROWS)
    torch.testing.assert_close(table(ids[:, None]), whole(ids[:, None]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("default", marks=SIZES),
        pytest.param("thread", marks=MANY),
        pytest.param("flat", marks=pytest.mark.ranks(3)),
    ],
)
def test_lookups_of_a_step_accumulate_and_ranks_are_weighted_by_samples(
    worlds, monkeypatch, world, how
):
    """Rank 0 has no samples; others look rows up twice, in two passes, with growing sizes."""
    if how == "flat":
        monkeypatch.setenv("HPCTRAIN_SHARED_MEMORY", "off")
    worlds.leave()
    worlds.enter(None if world.size < 3 else 2, "thread" if how == "thread" else "")
    table = make_table(hvd, "adagrad", padding_idx=9)
    alone, steps = alone_of(table, "adagrad", padding_idx=9)

    def parts_of(rank, step):
        num = 0 if rank == 0 and hvd.size() > 1 else 7 + rank
        return ids_of(rank, step, num, 2), torch.randint(0, ROWS, (2 * num, 400), generator=None)

    def loss_over(look, rank, step):
        torch.manual_seed(rank + 10 * step)
        first, second = parts_of(rank, step)
        found = look(first), look(second)
        return found[0].square().sum() + found[1].sin().sum(), len(first)

    nums = [len(parts_of(rank, 0)[0]) for rank in range(hvd.size())]
    for step in range(2):
        table.set_num_samples(nums[hvd.rank()])
        for number in range(2):
            loss, num = loss_over(table, hvd.rank(), step + 5 * number)
            (loss / num if num else loss).backward()
        table.step()
        steps[0].zero_grad()
        for rank in range(hvd.size()):
            for number in range(2):
                (loss_over(alone[0], rank, step + 5 * number)[0] / sum(nums)).backward()
        steps[0].step()
    assert table.steps == 2
    same_rows(table, alone[0])
    worlds.leave()


@MANY
def test_lookups_without_gradients_change_nothing(hvd_nodes):
    table = make_table(hvd_nodes, "adam")
    before = copy_of(table)
    table.eval()
    with torch.no_grad():
        table(torch.tensor([1, 2]))
    table(torch.tensor([3])).sum()  # no backward
    table(torch.tensor([4])).sum().backward()
    table.zero_grad()
    table.step()
    assert table.steps == 0
    assert torch.equal(copy_of(table), before)
    assert [*table.parameters()] == [] == [*table.state_dict()]


@SIZES
@pytest.mark.parametrize("mode", [None, "sum"])
def test_empty_first_lookup_has_the_shape_of_its_ids(hvd_nodes, mode):
    """On all ranks, on one, or with padding only: no row is sent between nodes."""
    hvd = hvd_nodes
    for dtype, shape in [(torch.float32, (0, 3)), (torch.float64, (3, 0)), (torch.float32, (0,))]:
        for lone in (False, True):
            table = make_table(hvd, "adagrad", dtype=dtype, mode=mode, padding_idx=4)
            ids = torch.zeros(shape, dtype=torch.int64)
            offsets = (
                None if mode is None or len(shape) == 2 else torch.zeros(0, dtype=torch.int64)
            )
            if lone and hvd.rank() > 0:
                ids, offsets = torch.full((2, 2), 4), None
            num = (len(ids),) if mode and offsets is None else ids.shape
            for _ in range(2):
                found = table(ids, offsets)
                assert found.shape == (*num, DIM)
                assert not found.any()
                found.sum().backward()
                table.step()
            assert table.steps == 0
            assert copy_of_bags(table, mode).any()


def copy_of_bags(table, mode):
    ids = torch.arange(ROWS)
    return table(ids if mode is None else ids[:, None])


@MANY
def test_frozen_table_is_unchanged(hvd_nodes):
    table = make_table(hvd_nodes, "adam")
    before = copy_of(table)
    table(torch.tensor([4])).sum().backward()
    table.requires_grad_(False)
    assert not table(torch.tensor([3])).requires_grad
    table.step()
    assert table.steps == 0
    table.requires_grad_(True)
    table.step()
    assert torch.equal(copy_of(table), before)
    table(torch.tensor([3])).sum().backward()
    table.step()
    assert (copy_of(table) != before).any(dim=1).nonzero().tolist() == [[3]]


@MANY
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_model_around_a_table_clears_its_gradients_and_freezes_it(hvd_nodes, set_to_none):
    """The model has no parameter of the table in any of these states."""
    table = make_table(hvd_nodes)
    model = nn.Sequential(nn.ModuleDict({"table": table}), nn.Linear(DIM, 1))
    before = copy_of(table)
    for row in (3, 4):
        table(torch.tensor([row])).sum().backward()
        table(torch.tensor([row + 2])).sum().backward()
        model.zero_grad(set_to_none)
    table.step()
    assert torch.equal(copy_of(table), before)
    model.zero_grad(set_to_none)
    table(torch.tensor([7])).sum().backward()
    table.step()
    assert (copy_of(table) != before).any(dim=1).nonzero().tolist() == [[7]]
    assert model.requires_grad_(False) is model
    assert not table(torch.tensor([3])).requires_grad
    table.step()
    assert table.steps == 1
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert [*model.state_dict()] == ["1.weight", "1.bias"]
    model.requires_grad_(hvd_nodes.rank() > 0)
    with pytest.raises(MismatchError, match=r"requires_grad_\(False\) of a table must be called"):
        table.step()


@MANY
def test_accumulating_or_nan_gradients_are_reported_once(hvd_nodes, caplog):
    table = make_table(hvd_nodes)
    for _ in range(101):
        table(torch.tensor([4])).sum().backward()
    output = [each.message for each in caplog.records]
    assert len(output) == (hvd_nodes.rank() == 0)
    assert all("keeps gradients of 100 lookups and has never stepped" in each for each in output)
    table.zero_grad()
    caplog.clear()
    for _ in range(2):
        (table(torch.tensor([4])) * float("nan")).sum().backward()
        table.step()
    output = hvd_nodes.allgather_object([each.message for each in caplog.records])
    [text] = [text for each in output for text in each]  # text of the owner
    assert "to leave out such a step, call zero_grad() of the model" in text


@MANY
def test_results_do_not_depend_on_timing(hvd_nodes, jitter):
    def rows_after():
        table = make_table(hvd_nodes, "adam", dtype=torch.float32)
        for step in range(4):
            table(ids_of(hvd_nodes.rank(), step, 50)).square().sum().backward()
            table.step()
        return copy_of(table)

    in_time = rows_after()
    sleeps = jitter()
    assert torch.equal(rows_after(), in_time)
    assert sleeps.num_sleeps


@MANY
def test_error_of_one_rank_raises_on_all_ranks(hvd_nodes):
    hvd = hvd_nodes
    table, other = make_table(hvd), make_table(hvd)
    first = hvd.rank() == 0

    def all_hear(function, text, error=MismatchError):
        with pytest.raises(error, match=text):
            function()
        current().comm.rejoin()

    wrong = torch.tensor([ROWS]) if first else torch.tensor([0])
    all_hear(lambda: table(wrong), "rank 0: ids of a table of 5000 rows .* 0 to 4999, got 5000")
    wrong = torch.tensor([-1]) if first else torch.tensor([0])
    all_hear(lambda: table(wrong), "got -1")
    wrong = [0] if first else torch.tensor([0])
    all_hear(lambda: table(wrong), "rank 0: ids must be a dense tensor of integers, got list")
    wrong = torch.tensor([0.5]) if first else torch.tensor([0])
    all_hear(lambda: table(wrong), "got torch.float32")
    wrong = torch.tensor([1]).to(torch.uint16) if first else torch.tensor([0])
    all_hear(lambda: table(wrong), r"ids must be int32, int64 or uint8; use ids.long\(\)")
    wrong = torch.tensor([1]).to_sparse() if first else torch.tensor([0])
    all_hear(lambda: table(wrong), r"use ids.to_dense\(\)")
    all_hear(lambda: (table if first else other)(torch.tensor([0])), "lookup of table")
    all_hear(lambda: table(torch.tensor([0])) if first else table.step(), "step of table")
    for how in ({"lr": 0.1 + first}, {"cache_rows": 10 + first}, {"cache_steps": int(first)}):
        all_hear(lambda of=how: make_table(hvd, **of), "a table must be the same")
    all_hear(
        lambda: make_table(hvd, optimizer="adagard" if first else "sgd"), "adagard", ConfigError
    )
    for wrong in (
        {"padding_idx": ROWS},
        {"padding_idx": "x"},
        {"mode": "max"},
        {"betas": (0, 0)},
        {"lr": -1.0},
        {"init": "x"},
        {"seed": 0.5},
        {"cache_rows": -1},
        {"cache_rows": True},
        {"cache_rows": 0, "cache_steps": 1},
        {"cache_steps": 0.5},
    ):
        all_hear(lambda how=wrong: make_table(hvd, **how), "got|betas", ConfigError)
    for wrong in ("x", 2**31, 0):
        all_hear(
            lambda num=wrong: hvd.ShardedEmbedding(num, 3), "from 1 to 2147483647", ConfigError
        )
    for wrong in (-1, math.inf, math.nan, None, "0.1", True):
        with pytest.raises(ConfigError, match="the lr of a table must be"):
            table.lr = wrong
    assert table.lr == 0.1
    for wrong in (copy.deepcopy, pickle.dumps):
        all_hear(lambda do=wrong: do(table), "cannot be copied", ConfigError)
    for wrong in (None, table):
        all_hear(lambda of=wrong: table.step_with(of), "optimizer of a table must be", ConfigError)
    all_hear(table.half, "make the table with dtype=, or convert", ConfigError)
    with pytest.raises(AttributeError, match="look rows up by"):
        _ = table.weight
    assert "padding_idx=None, init=0.05, seed=5, dtype=torch.float64" in repr(table)
    assert table.to("cpu").double()(torch.tensor([1])).shape == (1, DIM)  # still usable


@MANY
def test_lookup_concurrent_with_another_operation_raises_on_all_ranks(hvd_nodes):
    calls = [make_table(hvd_nodes), current().comm.allgather_object]
    with pytest.raises(MismatchError, match=r"lookup of table .* gather of objects everywhere"):
        calls[hvd_nodes.rank() > 0](torch.tensor([1]))


@SIZES
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_looked_up_rows_may_be_changed_in_place(hvd_nodes, shape):
    table = make_table(hvd_nodes, lr=1.0)
    ids = torch.full(shape, 2)
    with torch.no_grad():
        before = table(ids)
    found = table(ids)
    found += 1
    found[..., 0] = 0
    found.sum().backward()
    table.step()
    taken = (before - table(ids)).detach()
    expected = torch.full_like(taken, ids.numel())
    expected[..., 0] = 0
    torch.testing.assert_close(taken, expected)


@MANY
def test_steps_that_differ_between_ranks_raise_on_all(hvd_nodes):
    hvd = hvd_nodes
    first = hvd.rank() == 0

    def lr(table):
        table.lr = 0.1 + first

    def count(table):
        if first:
            table.set_num_samples(3)

    def freeze(table):
        table.requires_grad_(not first)

    for change, text in {
        lr: r"lr of a table must be the same on every rank.*rank 0: 1.1; rank",
        count: r"set_num_samples of a table must be called by all ranks or by none, but 1 of",
        freeze: r"requires_grad_\(False\) of a table must be called by .* or by none, but 1 of",
    }.items():
        table = make_table(hvd)
        table(torch.tensor([1])).sum().backward()
        change(table)
        with pytest.raises(MismatchError, match=text):
            table.step()
        assert table.steps == 0


@MANY
def test_table_has_its_own_sample_count_with_a_plain_optimizer(hvd_nodes):
    hvd, dense = hvd_nodes, nn.Linear(1, 1)
    tables = [make_table(hvd), make_table(hvd)]
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    tables[0].step_with(optimizer)
    with pytest.raises(ConfigError, match="step_with must be called once"):
        tables[0].step_with(optimizer)
    for table in tables:
        table.set_num_samples(hvd.rank())
        table(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    tables[1].step()
    assert torch.equal(*map(copy_of, tables))
    other, averaging = make_table(hvd), hvd.DistributedOptimizer(optimizer)
    other.step_with(averaging)
    with pytest.raises(ConfigError, match="must be set by that optimizer"):
        other.set_num_samples(3)
    assert averaging.param_groups  # the optimizer is referenced here; a deleted one counts nothing


@MANY
def test_table_of_a_world_that_was_shut_down_raises(worlds):
    worlds.leave()
    worlds.enter(None)
    table = make_table(hvd)
    table(torch.tensor([1])).sum().backward()
    worlds.leave()
    worlds.enter(None)
    ids = torch.tensor([1])
    for use in (lambda: table(ids), table.step, lambda: table.load_sharded_state({})):
        with pytest.raises(hvd.NotInitializedError, match="of a world that was shut down"):
            use()
    worlds.leave()


@MANY
def test_table_beyond_memory_or_disk_is_rejected_on_all_ranks(hvd_nodes, tmp_path):
    make = hvd_nodes.ShardedEmbedding
    with pytest.raises(hvd_nodes.NodeMemoryError, match="of memory on this node"):
        make(2**31 - 1, 1 << 20)
    with pytest.raises(hvd_nodes.NodeMemoryError, match="of memory on this node"):
        make(1000, 8, cache_rows=10**13)
    with pytest.raises(hvd_nodes.NodeMemoryError, match=r"cannot reserve .* of the folder"):
        make(2**31 - 1, 1 << 16, path=tmp_path)
    with pytest.raises(ConfigError, match="there is no"):
        make(10, 2, path=tmp_path / "nothing")


@MANY
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rows_on_disk_are_equal_to_rows_in_memory(hvd_nodes, tmp_path, optimizer):
    tables = [make_table(hvd_nodes, optimizer, path=path) for path in (None, tmp_path)]
    assert not [*tmp_path.iterdir()]
    for table in tables:
        for step in range(3):
            table(ids_of(hvd_nodes.rank(), step)).square().sum().backward()
            table.step()
    assert torch.equal(*map(copy_of, tables))
