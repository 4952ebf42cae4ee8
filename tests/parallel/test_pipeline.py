"""The stages of a pipeline train as one process does, with every schedule."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from hpctrain import ConfigError, MismatchError
from hpctrain.parallel import Pipeline, build_mesh, tensor_parallel
from hpctrain.parallel.stage import SCHEDULES
from tests.parallel.training import CLIP, LENGTH, adamw, batches, check, lm, loss_of, transformer

DEPTH = 5  # with embedding, norm and head, one layer for each of eight stages


def trained(pipeline, data, **shape):
    """Train; compare losses and parameters with one process."""
    optimizer, losses = adamw(pipeline.model.parameters()), []
    for given, following in batches():
        optimizer.zero_grad()
        mine = (x.chunk(data.size())[data.get_local_rank()] for x in (given, following))
        with loss_parallel():
            loss = pipeline.step(*mine)
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=data.get_group())
        losses.append(loss.item())
        assert pipeline.clip_grad_norm_(CLIP) > CLIP
        optimizer.step()
    check(losses, pipeline.model.named_parameters(), **shape)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nodes")
def test_stages_per_rank_sets_the_number_of_stages():
    mesh, options = build_mesh(pp=2), {"loss": loss_of, "num_microbatches": 4}
    for number, schedule in ((3, "1f1b"), (1, "interleaved"), (4, "zbv")):
        more = {"schedule": schedule, "stages_per_rank": number}
        with pytest.raises(ConfigError, match=f"schedule {schedule}, got {number};"):
            Pipeline(transformer(), mesh["pp"], lm.LAYERS, **options, **more)
    more = {"schedule": "interleaved", "stages_per_rank": 4}
    pipeline = Pipeline(transformer(depth=DEPTH), mesh["pp"], lm.LAYERS, **options, **more)
    assert len(pipeline.split) == 8
    trained(pipeline, mesh["dp"], depth=DEPTH)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nodes")
def test_stages_that_clip_to_different_norms_raise_on_all_ranks():
    mesh = build_mesh(pp=2)
    pipeline = Pipeline(transformer(), mesh["pp"], lm.LAYERS, loss=loss_of, num_microbatches=2)
    with loss_parallel():
        pipeline.step(*batches()[0])
    assert pipeline.clip_grad_norm_(math.inf) > 0
    with pytest.raises(MismatchError, match=r"rank 0: max_norm 1.0; rank 1: max_norm 2.0"):
        pipeline.clip_grad_norm_(1.0 + dist.get_rank())


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("nodes")
def test_models_with_different_weights_raise_on_all_ranks():
    mesh, model = build_mesh(pp=dist.get_world_size()), transformer()
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1
    with pytest.raises(MismatchError, match="broadcast_parameters"):
        Pipeline(model, mesh["pp"], lm.LAYERS, loss=loss_of, num_microbatches=4)


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_train_as_one_process_does(schedule):
    mesh = build_mesh(pp=dist.get_world_size())
    shape = {"depth": DEPTH, "tied": schedule in ("1f1b", "zbv")}
    options = {"loss": loss_of, "num_microbatches": 8, "schedule": schedule}
    pipeline = Pipeline(transformer(**shape), mesh["pp"], lm.LAYERS, **options)
    trained(pipeline, mesh["dp"], **shape)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nodes")
def test_gradients_of_several_batches_accumulate():
    mesh, ((given, following),) = build_mesh(pp=2), batches(1)
    options = {"loss": loss_of, "num_microbatches": 2}
    pipeline = Pipeline(transformer(tied=True), mesh["pp"], lm.LAYERS, **options)
    for part in (slice(4), slice(4, 8)):
        pipeline.step(given[part], following[part])
    one = transformer(tied=True)
    expected = torch.tensor(loss_of(one(given), following).item(), dtype=torch.float64)
    torch.testing.assert_close(pipeline.evaluate(given, following), expected, rtol=1e-12, atol=0)
    (2 * loss_of(one(given), following)).backward()
    for name, parameter in pipeline.model.named_parameters():
        expected = one.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("inner", ["tensor parallel", "shards"])
def test_stages_may_use_tensor_parallelism_or_shards(inner):
    shape = {"depth": 2, "tied": inner == "tensor parallel"}
    model, sizes, wrap = transformer(**shape), {"pp": 2}, None
    if inner == "tensor parallel":
        mesh = build_mesh(tp=2, **sizes)
        tensor_parallel(model, mesh["tp"], lm.ROLES, sequence=True)
    else:
        mesh = build_mesh(**sizes)
        wrap = lambda stage: fully_shard(stage, mesh=mesh["dp"])  # noqa: E731
    sample = torch.zeros(2, LENGTH, dtype=torch.long)
    options = {"loss": loss_of, "num_microbatches": 2, "sample": sample, "wrap": wrap}
    trained(Pipeline(model, mesh["pp"], lm.LAYERS, **options), mesh["dp"], **shape)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("place", ["first", "last"])
def test_stages_without_parameters_train_as_one_process_does(place):
    size = dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Tanh() for _ in range(size - 1)]
    layers.insert(0 if place == "first" else size, nn.Linear(4, 4))
    one = nn.Sequential(*layers).double()
    mesh, loss = build_mesh(pp=size), nn.functional.mse_loss
    pipeline = Pipeline(
        copy.deepcopy(one), mesh["pp"], ["*"], loss=loss, num_microbatches=size, schedule="gpipe"
    )
    mine = dict(pipeline.model.named_parameters())
    assert len(mine) == 2 * (dist.get_rank() == (0 if place == "first" else size - 1))
    for _ in range(2):
        given, target = torch.randn(2, 2 * size, 4, dtype=torch.float64)
        expected = loss(one(given), target)
        torch.testing.assert_close(pipeline.step(given, target), expected.detach())
        expected.backward()
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, one.get_parameter(name).grad)
    with pytest.raises(MismatchError, match="a batch of a pipeline"):
        pipeline.step(given + dist.get_rank(), target)
