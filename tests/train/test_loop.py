from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from hpctrain.core.records import read
from hpctrain.runtime.stopping import StopRequests
from hpctrain.train.attempts import RunInDirectory
from hpctrain.train.console import make_console
from hpctrain.train.evaluation import evaluate
from hpctrain.train.loop import ends_interval
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.task import Task, build
from tests.train.job import train_alone
from tests.train.problem import NUM_SAMPLES, samples


def train_together(task: Task, folder):
    """Train in a new run directory; return the scores and the records."""
    run = RunInDirectory(task, RunDirectory(folder / "run"), make_console(shown=False))
    scores = run.carry_out("", StopRequests(), continues=False).scores
    return scores, read(folder / "run" / "metrics.jsonl")


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "overrides",
    [
        # The last batch of an epoch has one sample, so only one rank has a sample.
        ["train.global_batch=52"],
        ["train.global_batch=13", "train.clip_norm=0.05"],
        ["train.global_batch=9", "optimizer.name=AdamW", "optimizer.lr=0.01"],
        # On 3 and 4 ranks, some ranks have fewer samples than pieces, and none in the last batch.
        ["train.global_batch=13", "train.accumulate=5"],
        ["train.global_batch=13", "train.clip_norm=0.05", "train.shard=node"],
        ["train.global_batch=13", "train.accumulate=5", "train.shard=node"],
    ],
    ids=lambda overrides: " ".join(word.partition(".")[2] for word in overrides),
)
def test_any_number_of_ranks_trains_as_the_plain_loop(here, configure, shared, overrides):
    if "optimizer.name=AdamW" not in overrides:
        overrides = [*overrides, "optimizer.args.momentum=0.9", "optimizer.lr=0.05"]
    config = configure("train.epochs=2", *overrides, "log.every_steps=1")
    task = build(config, here.comm)
    _, records = train_together(task, shared)
    plain, losses, _ = train_alone(config, task)
    for mine, theirs in zip(task.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    found = [record["loss"] for record in records if record["event"] == "step"]
    assert found == pytest.approx(losses, rel=1e-11)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("metric", ["loss", "tests.train.problem:distance"])
def test_the_model_is_tested_at_its_interval_and_at_the_end(here, configure, shared, metric):
    config = configure("train.epochs=5", "test.every_epochs=2", f"test.metric={metric}")
    task = build(config, here.comm)
    scores, records = train_together(task, shared)
    assert scores.num_samples == NUM_SAMPLES
    assert task.metric_name == metric.rpartition(":")[2]
    tests = [record for record in records if record["event"] == "test"]
    assert [record["epoch"] for record in tests] == [2, 4, 5]
    assert (tests[-1]["metric"], tests[-1]["loss"]) == (scores.metric, scores.loss)
    assert (scores.metric == scores.loss) == (metric == "loss")


@pytest.mark.ranks(2, 3)
def test_ranks_with_dropout_and_buffers_keep_the_same_weights(here, configure, shared, world):
    config = configure("train.epochs=2", "model.args={dropout = 0.5, norm = true}")
    task = build(config, here.comm)
    train_together(task, shared)
    state = torch.cat([tensor.double().view(-1) for tensor in task.model.state_dict().values()])
    assert len(set(world.allgather(state.numpy().tobytes()))) == 1


@pytest.mark.parametrize("every_steps", [1, 3, 7, 10, 50])
@pytest.mark.parametrize("epoch_steps", [1, 4, 23, 100])
def test_records_divide_each_epoch_evenly_and_end_with_it(epoch_steps, every_steps):
    ends = [s for s in range(1, 2 * epoch_steps + 1) if ends_interval(s, epoch_steps, every_steps)]
    assert epoch_steps in ends
    assert 2 * epoch_steps in ends
    lengths = [b - a for a, b in pairwise([0, *ends])]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.ranks(1, 2, 3, 4)
def test_scores_equal_those_of_one_process_with_the_buffers_of_rank_0(here, configure):
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
