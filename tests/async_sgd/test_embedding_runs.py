"""Check ``hpctrain train`` with a sharded embedding, and its checkpoints."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import hpctrain
from hpctrain.checkpoint.format.shard import TensorPiece
from hpctrain.checkpoint.manager import Manager
from hpctrain.core.errors import MismatchError
from hpctrain.data.loader import Loader
from hpctrain.runtime.world import current
from hpctrain.train.evaluation import evaluate
from hpctrain.train.load_config import load
from hpctrain.train.predict import load_task
from tests.async_sgd.embedding_oracle import copy_of, ids_of
from tests.async_sgd.problem import DIM, ROWS, Model, copied
from tests.train.conftest import here, shared
from tests.train.job import Job

__all__ = ["here", "shared"]


@pytest.fixture
def make_job(here, shared):
    """Make runs in which ranks have unequal samples, and sometimes none."""

    def configure(*overrides):
        base = [
            "model.target=tests.async_sgd.problem:model",
            "data.target=tests.train.problem:data",
            f"data.args.folder={shared}/d",
        ]
        return load(None, [*base, *overrides]).config

    def make(name, *overrides):
        settings = ("train.global_batch=17", "train.epochs=3")
        return Job(here, configure, shared / name, *settings, "schedule.name=cosine", *overrides)

    return make


def alone(config, task, first_rows, first_weights):
    """Train with torch's own table in this process."""
    model = Model(nn.Embedding(ROWS, DIM, sparse=True).double())
    model.load_state_dict({"table.weight": first_rows, **first_weights})
    dense = torch.optim.SGD(model.layer.parameters(), lr=config.optimizer.lr, momentum=0.9)
    rows = torch.optim.SparseAdam([model.table.weight], lr=0.03)
    how = {"global_batch": 17, "order": config.data.order, "seed": config.seed}
    loader = Loader(task.train.dataset, rank=0, size=1, **how)
    steps = [dense, rows]
    peaks = [config.optimizer.lr, 0.03]
    for step, batch in enumerate(batch for _ in range(config.train.epochs) for batch in loader):
        for one, peak in zip(steps, peaks, strict=True):
            one.param_groups[0]["lr"] = peak * task.schedule(step)
            one.zero_grad()
        functional.cross_entropy(model(batch.x), batch.y).backward()
        for one in steps:
            one.step()
    return model


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="plain", marks=pytest.mark.ranks(1, 2, 4)),
        pytest.param(
            ("train.accumulate=3", "train.shard=none"), id="others", marks=pytest.mark.ranks(2)
        ),
    ],
)
def test_run_is_equal_to_the_plain_loop_of_one_process(make_job, overrides):
    """Checks of replicas and the broadcast of first weights leave rows unchanged."""
    job = make_job("run", "train.check_replicas=1", *overrides)
    task = job.built()
    weights = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    first = copied(task.model.table)
    assert [*weights] == ["layer.weight", "layer.bias"]
    job.part(task=task)
    model = alone(job.config, task, first, weights)
    torch.testing.assert_close(copied(task.model.table), model.table.weight, rtol=0, atol=1e-12)
    assert not torch.equal(copied(task.model.table), first)
    for name, p in task.model.named_parameters():
        torch.testing.assert_close(p, model.get_parameter(name), rtol=0, atol=1e-12)


@pytest.mark.ranks(2, 4)
def test_stopped_run_resumes_bitwise_with_the_same_scores(make_job):
    whole, stopped = make_job("whole"), make_job("stopped")
    tasks = [whole.built(), stopped.built()]
    outcome = whole.part(task=tasks[0])
    stopped.part(stop="SIGTERM", after=5, task=tasks[1])
    stopped.directory.stop.unlink(missing_ok=True)
    last = stopped.built()
    stopped.part(task=last)
    assert torch.equal(copied(last.model.table), copied(tasks[0].model.table))
    assert last.model.table.steps == tasks[0].model.table.steps == 12
    path = stopped.directory.path
    judged, _ = load_task(path, current().comm, overrides=(), which="last", split="test")
    assert evaluate(judged).loss == outcome.scores.loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "setting",
    [
        "train.precision=fp16",
        "train.reproducible=true",
        "train.ema=0.9",
        "sync.method=local_sgd",
        "train.on_non_finite=rollback",
        "train.on_spike=rollback",
    ],
)
def test_settings_incompatible_with_rows_are_rejected_on_all_ranks(make_job, setting):
    with pytest.raises(MismatchError, match="ShardedEmbedding must step its rows once"):
        make_job("run", setting).built()


def refuse(make, table, state):
    """Load an invalid state, on one rank or on all."""
    own = "5000 rows of 6, padding_idx=2, init=0.05, seed=3, dtype=torch.float32"
    for other, text in (
        ({"optimizer": "sgd"}, "must load the state of the same optimizer"),
        ({"seed": 4}, f"the saved table has {own}"),
        ({"init": 0.1}, "init=0.1"),
        ({"padding_idx": 3}, "padding_idx=3"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"rows": 4000}, "has 4000 rows of 6.*5000 rows of 6"),
    ):
        with pytest.raises(hpctrain.CheckpointError, match=text):
            make(**other).load_sharded_state(state)
    before, lone = copy_of(table), current().topology.rank == 0
    pieces = state["tensors"]
    double = TensorPiece(pieces["rows"].tensor.double(), pieces["rows"].shard)
    for wrong in (
        None,
        {"tensors": {}},
        {**state, "lr": math.nan},
        {**state, "tensors": {**pieces, "rows": pieces["rows"].tensor}},
        {**state, "tensors": {**pieces, "rows": double}},
    ):
        with pytest.raises(hpctrain.CheckpointError, match=r"; |got"):
            table.load_sharded_state(wrong if lone else state)
    if current().topology.size > 1:
        with pytest.raises(MismatchError, match="load the same checkpoint on every rank"):
            table.load_sharded_state({**state, "steps": 2 + lone})
    assert torch.equal(copy_of(table), before)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("adam", marks=pytest.mark.ranks(1, 2, 3, 4)),
        pytest.param("adagrad", marks=pytest.mark.ranks(3)),
    ],
)
def test_checkpoint_resumes_bitwise_on_other_numbers_of_ranks(world, tmp_path, optimizer):
    folder = world.bcast(tmp_path)

    def in_world(ranks, function):
        """Initialize a world of some ranks and call a function in it."""
        if world.rank in ranks:
            hpctrain.init(list(ranks))
            function(current().comm)
            hpctrain.shutdown()
        world.Barrier()

    def make(rows=5000, **options):
        how = {"optimizer": optimizer, "seed": 3, "padding_idx": 2, **options}
        return hpctrain.ShardedEmbedding(rows, 6, **how)

    def step(table, number):
        """Take a step that does not depend on the number of ranks."""
        ids = ids_of(0, number, 40)
        ids = ids if current().topology.rank == 0 else ids[:0]
        table.set_num_samples(len(ids))
        table(ids).square().sum().backward()
        table.step()

    def save(comm):
        table = make()
        for number in range(3):
            step(table, number)
        manager = Manager(folder / "c", comm)
        manager.save({"model": {"a/b": table.sharded_state()}}, 3, wait=True)
        manager.close()
        step(table, 3)
        torch.save(copy_of(table), folder / "rows") if comm.rank == 0 else copy_of(table)

    def go_on(comm):
        table, manager = make(), Manager(folder / "c", comm)
        loaded = manager.load_latest(into=table.wanted("model/a%2Fb"))
        manager.close()
        state = loaded.state["model"]["a/b"]
        for number in (9, 3, 3):  # loading must discard all of this, rows and moments
            step(table, number)
        table.load_sharded_state(state)
        step(table, 3)
        assert torch.equal(copy_of(table), torch.load(folder / "rows"))
        refuse(make, table, state)

    in_world(range(world.size), save)
    for size in {1, 2, world.size}:
        in_world(range(min(size, world.size)), go_on)
