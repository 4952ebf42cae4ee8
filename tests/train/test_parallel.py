"""Runs of ``[parallel]``: any layout trains as one process does, and goes on in any other."""

import pytest
import torch
import torch.distributed as dist

import hpctrain
from hpctrain.checkpoint.export import newest_state
from hpctrain.core.records import read
from hpctrain.runtime.world import current
from hpctrain.train.load import load
from tests.train import divided
from tests.train.job import Job

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def here():
    """Join the world, and leave torch's group of all ranks behind."""
    hpctrain.init(ranks_per_node=2)
    yield current()
    if dist.is_initialized():
        dist.destroy_process_group()
    hpctrain.shutdown()


@pytest.fixture
def job(here, shared):
    """Configure a run in a folder, whose parts are carried out in this process."""

    def make(name: str, *overrides: str) -> Job:
        settings = [*divided.SETTINGS, f"data.args.folder={shared}/d", f"output_dir={shared}/{name}"]
        made = Job.__new__(Job)
        made.here, made.overrides = here, overrides
        made.config = load(None, [*settings, *overrides]).config
        from hpctrain.train.run_directory import RunDirectory

        made.directory = RunDirectory(made.config.directory)
        return made

    return make


def divide(layout: str) -> list[str]:
    return [f"parallel.{each}" for each in layout.split()]


def records(job: Job, event: str) -> list[dict]:
    return [record for record in read(job.directory.metrics) if record["event"] == event]


def check(job: Job, dataset, *, tolerance=EXACT, **how) -> None:
    """Compare what a run has found with a plain loop in one process."""
    losses, weights, (loss, metric) = divided.alone(dataset, **how)
    torch.testing.assert_close([r["loss"] for r in records(job, "step")], losses, **tolerance)
    (finished,) = records(job, "finished")
    torch.testing.assert_close([finished["loss"], finished["metric"]], [loss, metric], **tolerance)
    saved = newest_state(job.directory.path)[1]["model"]
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, **tolerance)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "layout",
    [
        "tp=2 sequence=true",
        "pp=2 schedule=zero_bubble",
        "cp=2",
        "tp=2 pp=2",
        "pp=2 schedule=interleaved micro_batches=3",
    ],
)
def test_a_layout_trains_as_one_process_does(job, layout):
    one = job("run", *divide(layout))
    task = one.built()
    one.part(task=task)
    one.here.comm.barrier()
    check(one, task.train.dataset)


@pytest.mark.ranks(4)
def test_a_run_goes_on_in_any_other_layout(job):
    layouts = ["", "tp=2", "pp=2", "cp=2", "tp=2 pp=2", ""]
    for number, layout in enumerate(layouts, 1):
        one = job("run", *divide(layout), "train.epochs=2", "model.args.tied=true")
        task = one.built()
        stop = {} if number == len(layouts) else {"stop": "SIGUSR1", "after": 1 + number % 2}
        one.part(task=task, **stop)
        one.here.comm.barrier()
    check(one, task.train.dataset, epochs=2, tied=True)
