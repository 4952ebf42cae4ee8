"""Pipelines built with torch alone, over groups with our backend."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.requires("torch-2.7"),
    pytest.mark.usefixtures("ours"),
]


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_of_torch_has_the_gradients_of_one_process(name):
    from torch.distributed import pipelining  # noqa: PLC0415 - newer than the oldest torch

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(size))).double()
    given, wanted = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    alone = copy.deepcopy(layers)
    mse_loss(alone(given), wanted).backward()

    stage = pipelining.PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, n_microbatches=4, loss_fn=mse_loss)
    for _ in range(2):
        layers.zero_grad()
        target = {"target": wanted} if rank == size - 1 else {}
        schedule.step(*[given][rank:], **target)
    for mine, of_one in zip(layers[rank].parameters(), alone[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, of_one.grad)
