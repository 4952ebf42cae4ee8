import io
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch.nn import functional

from hpctrain.runtime.stopping import StopRequests
from hpctrain.train.boundary import Boundary
from hpctrain.train.console import Progress
from hpctrain.train.evaluate import evaluate
from hpctrain.train.loop import TrainingLoop, ends_interval
from hpctrain.train.metrics import Metrics, read
from hpctrain.train.run_state import RunState
from hpctrain.train.task import Task, build
from tests.train.job import train_alone
from tests.train.problem import NUM_SAMPLES, samples


def train_together(task: Task, here, path):
    progress = Progress(Console(file=io.StringIO(), quiet=True), task.num_steps, 1, "accuracy")
    with Metrics(path if here.comm.rank == 0 else None) as metrics, progress:
        boundary = Boundary(here.comm, StopRequests(), None, metrics)
        return TrainingLoop(RunState(task=task), metrics, progress, boundary).train().scores


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "overrides",
    [
        # The last batch of an epoch has 1 sample, for one rank.
        ["train.global_batch=52"],
        ["train.global_batch=13", "train.clip_norm=0.05"],
        ["train.global_batch=9", "optimizer.name=AdamW", "optimizer.lr=0.01"],
    ],
    ids=lambda overrides: " ".join(word.partition(".")[2] for word in overrides),
)
def test_any_number_of_ranks_trains_as_the_plain_loop_does(here, configure, shared, overrides):
    if "optimizer.name=AdamW" not in overrides:
        overrides = [*overrides, "optimizer.args.momentum=0.9", "optimizer.lr=0.05"]
    config = configure("train.epochs=2", *overrides, "log.every_steps=1")
    task = build(config, here.comm)
    train_together(task, here, shared / "metrics.jsonl")
    plain, losses, _ = train_alone(config, task)
    for mine, theirs in zip(task.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    if here.comm.rank == 0:
        records = [r for r in read(shared / "metrics.jsonl") if r["event"] == "step"]
        assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-11)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("metric", ["loss", "tests.train.problem:distance"])
def test_the_model_is_tested_at_its_interval_and_at_the_end(here, configure, shared, metric):
    config = configure("train.epochs=5", "test.every_epochs=2", f"test.metric={metric}")
    task = build(config, here.comm)
    scores = train_together(task, here, shared / "metrics.jsonl")
    assert scores.num_samples == NUM_SAMPLES
    assert task.metric_name == metric.rpartition(":")[2]
    if here.comm.rank == 0:
        records = [r for r in read(shared / "metrics.jsonl") if r["event"] == "test"]
        assert [record["epoch"] for record in records] == [2, 4, 5]
        assert (records[-1]["metric"], records[-1]["loss"]) == (scores.metric, scores.loss)
        assert (scores.metric == scores.loss) == (metric == "loss")


@pytest.mark.ranks(2, 3)
def test_ranks_with_dropout_and_buffers_keep_the_same_weights(here, configure, shared, world):
    config = configure("train.epochs=2", "model.args={dropout = 0.5, norm = true}")
    task = build(config, here.comm)
    train_together(task, here, shared / "metrics.jsonl")
    state = torch.cat([tensor.double().view(-1) for tensor in task.model.state_dict().values()])
    assert len(set(world.allgather(state.numpy().tobytes()))) == 1


@pytest.mark.parametrize("every_steps", [1, 3, 7, 10, 50])
@pytest.mark.parametrize("epoch_steps", [1, 4, 23, 100])
def test_records_cut_each_epoch_evenly_and_end_with_it(epoch_steps, every_steps):
    ends = [s for s in range(1, 2 * epoch_steps + 1) if ends_interval(s, epoch_steps, every_steps)]
    assert epoch_steps in ends
    assert 2 * epoch_steps in ends
    lengths = [b - a for a, b in pairwise([0, *ends])]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_scores_are_those_of_one_process_with_the_buffers_of_rank_0(here, configure):
    config = configure("train.global_batch=5", "model.args={dropout = 0.5, norm = true}")
    task = build(config, here.comm)
    task.model[0].running_mean += here.comm.rank
    scores = evaluate(task)
    assert task.model.training
    assert not task.model[0].running_mean.any()
    x, y = map(torch.from_numpy, samples().values())
    with torch.no_grad():
        output = task.model.eval()(x)
    assert scores.num_samples == NUM_SAMPLES
    assert scores.metric == (output.argmax(dim=1) == y).sum().item() / NUM_SAMPLES
    assert scores.loss == pytest.approx(functional.cross_entropy(output, y).item(), rel=1e-12)
