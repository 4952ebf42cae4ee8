from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.data.loader import Loader
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import write_arrays
from hpctrain.train.config import RunConfig
from hpctrain.train.evaluate import evaluate
from hpctrain.train.task import Task

NUM_SAMPLES = 23


def make_task(model, folder, comm, metric):
    dataset = ShardedDataset.open(folder, comm)
    loader = Loader(dataset, global_batch=5, comm=comm, order="sequential")
    return Task(
        config=RunConfig(),
        comm=comm,
        model=model,
        loss=functional.cross_entropy,
        metric=metric,
        optimizer=SimpleNamespace(),
        train=loader,
        test=loader,
        schedule=lambda _: 1.0,
    )


@pytest.fixture
def data(tmp_path, world):
    """A shared folder with random samples, and the samples."""
    folder = world.bcast(tmp_path)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator)
    y = torch.randint(3, (NUM_SAMPLES,), generator=generator)
    if world.rank == 0:
        write_arrays(folder / "d", {"x": x.numpy(), "y": y.numpy()}, samples_per_shard=10)
    world.barrier()
    return folder / "d", x, y


def right(output, label):
    return output.argmax(dim=1) == label


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_number_is_that_of_one_process_that_sees_everything(world, data):
    folder, x, y = data
    torch.manual_seed(1)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
    scores = evaluate(make_task(model, folder, MpiCommunicator(world), right))
    assert model.training
    with torch.no_grad():
        output = model.eval()(x)
    assert scores.num_samples == NUM_SAMPLES
    assert scores.metric == right(output, y).sum().item() / NUM_SAMPLES
    assert scores.loss == pytest.approx(functional.cross_entropy(output, y).item(), rel=1e-6)


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_tests_with_the_buffers_of_rank_0(world, data):
    folder, x, y = data
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[0].running_mean += world.rank
    scores = evaluate(make_task(model, folder, MpiCommunicator(world), None))
    assert model[0].running_mean.tolist() == [0.0] * 4
    with torch.no_grad():
        expected = functional.cross_entropy(model.eval()(x), y).item()
    assert scores.loss == scores.metric == pytest.approx(expected, rel=1e-6)
