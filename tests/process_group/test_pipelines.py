"""Pipelines of torch calculate the gradients of one process; its checkpoints go to other ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss

from tests.process_group.test_training import batches, check, mine, mlp, sharded

pytestmark = [pytest.mark.ranks(4), pytest.mark.usefixtures("nodes")]

SCHEDULES = {  # and stages per rank
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def stages_of(name, count):
    """Return the numbers of this rank's stages: in turn, or there and back."""
    me, size = dist.get_rank(), dist.get_world_size()
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [me, 2 * size - 1 - me]
    return [me + size * number for number in range(count)]


@pytest.mark.parametrize(("name", "count"), SCHEDULES.items())
def test_pipelines_calculate_the_gradients_of_one_process(name, count):
    size = dist.get_world_size()
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(size * count)]
    whole = copy.deepcopy(nn.Sequential(*layers))
    x, y = (torch.randn(4 * size, 5, dtype=torch.float64) for _ in range(2))
    numbers = stages_of(name, count)
    stages = [
        PipelineStage(layers[number], number, len(layers), torch.device("cpu"))
        for number in numbers
    ]
    schedule = getattr(schedules, name)(
        stages[0] if count == 1 else stages, 2 * size, loss_fn=mse_loss
    )
    given = (x,) if 0 in numbers else ()
    schedule.step(*given, target=y if len(layers) - 1 in numbers else None)
    mse_loss(whole(x), y).backward()
    for number in numbers:
        found = [p.grad for p in layers[number].parameters()]
        check(found, [p.grad for p in whole[number].parameters()])


def step(model, optimizer, number):
    x, y = batches(number + 1)[number]
    optimizer.zero_grad()
    mse_loss(model(mine(x)), mine(y)).backward()
    optimizer.step()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_goes_on_as_if_there_had_been_none(tmp_path, world, in_background):
    folder = world.bcast(str(tmp_path))
    model = sharded(mlp())
    optimizer = adam(model)
    step(model, optimizer, 0)
    weights, state = get_state_dict(model, optimizer)
    if in_background:
        dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder).result()
    else:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    step(model, optimizer, 1)
    expected = [p.full_tensor() for p in model.parameters()]
    again = sharded(mlp())
    resumed = adam(again)
    weights, state = get_state_dict(again, resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state)
    step(again, resumed, 1)
    check(again.parameters(), expected)


@pytest.mark.ranks(4)
def test_a_checkpoint_of_four_ranks_goes_to_two_and_back(tmp_path, world):
    folders = [world.bcast(str(tmp_path / name)) for name in ("four", "two")]
    half = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    meshes, expected = (None, half, None), None
    for number, mesh in enumerate(meshes):
        model = mlp()
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = adam(model)
        weights, state = get_state_dict(model, optimizer)
        if number == 0:
            step(model, optimizer, 0)
            weights, state = get_state_dict(model, optimizer)
        else:
            group = None if mesh is None else mesh.get_group()
            told = {"model": weights, "optimizer": state}
            dcp.load(told, checkpoint_id=folders[number - 1], process_group=group)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        if number < 2 and (mesh is None or dist.get_rank() < 2):
            group = None if mesh is None else mesh.get_group()
            told = {"model": weights, "optimizer": state}
            dcp.save(told, checkpoint_id=folders[number], process_group=group)
        world.Barrier()
        if mesh is None:
            step(model, optimizer, 1)
            found = [p.full_tensor() for p in model.parameters()]
            expected = expected or found
            check(found, expected)
