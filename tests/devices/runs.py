"""Run trainings on the accelerator of torch, under any launcher: ``runs.py FOLDER [NAME ...]``.

The program checks that runs learn as on the CPU, resume with the same results, can be evaluated
again and can write outputs.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import torch
from torch import Tensor, nn

import hpctrain
from hpctrain.core.records import read
from hpctrain.runtime.world import current
from hpctrain.train.evaluation import evaluate
from hpctrain.train.load_config import load
from hpctrain.train.predict import load_task, predict
from hpctrain.train.run_config import RunConfig
from tests.devices.calls import load_simulated
from tests.train import problem
from tests.train.job import Job, assert_same_run

PRECISE, ROUNDED = {"rtol": 1e-4, "atol": 1e-5}, {"rtol": 0.1, "atol": 0.05}
CASES = {
    "bf16": (["train.precision=bf16"], ROUNDED),
    "fp16": (["train.precision=fp16"], ROUNDED),
    "local": (["sync.method=local_sgd", "sync.steps=3", 'sync.args.state="average"'], PRECISE),
    "diloco": (["sync.method=diloco", "sync.steps=3"], PRECISE),
    "int8": (["sync.compression=int8"], PRECISE),
}


class Tracking(nn.Module):
    """Keep a running mean, by operations that every device supports."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(problem.NUM_FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def model(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(Tracking(), *problem.model(dropout=dropout).float())


def configure(folder: Path) -> Callable[..., RunConfig]:
    base = ["model.target=tests.devices.runs:model", "data.target=tests.train.problem:data"]
    base += [f"data.args.folder={folder}/d", "data.args.single=true"]
    # The simulated device lacks some operations on several tensors, and isfinite() runs too early.
    base += ["optimizer.args.foreach=false", "train.on_non_finite=ignore"]

    return lambda *overrides: load(None, [*base, *overrides]).config


def goes_on_and_is_used_again(folder: Path) -> None:
    """Train in one and in two parts, with the same bits; evaluate again, and write the outputs."""
    keys = ["train.ema=0.9", "train.clip_norm=0.5", "train.accumulate=2", "train.epochs=2"]
    keys += ["model.args.dropout=0.3", 'test.metric=["accuracy", "f1"]']
    whole, parts = (
        Job(current(), configure(folder), folder / name, *keys) for name in ("whole", "parts")
    )
    task = whole.built()
    kind = torch.accelerator.current_accelerator().type
    assert (task.device.type, task.device_reason) == (kind, kind)
    assert {p.device for p in task.model.parameters()} == {task.device}
    assert task.train.pin_memory
    whole.part(task=task)
    parts.part(stop="SIGTERM", after=4)
    parts.part()
    assert_same_run(whole, parts)
    comm, records = current().comm, read(whole.directory.metrics)
    last = records[-1]
    assert next(r for r in records if r["event"] == "started")["device"] == kind
    task, _ = load_task(whole.directory.path, comm, overrides=[], which="last", split="test")
    again = evaluate(task)
    assert (again.loss, again.metrics) == (last["loss"], last["metrics"])
    predict(task, folder / "out.h5", {})
    with torch.no_grad():
        x = torch.from_numpy(problem.samples()["x"]).float().to(task.device)
        expected = task.model.eval()(x).cpu()
    with h5py.File(folder / "out.h5") as written:
        torch.testing.assert_close(torch.from_numpy(written["output"][:]), expected)


def learns_as_on_the_cpu(folder: Path, keys: list[str], tolerance: dict[str, float]) -> None:
    here, learnt = current(), []
    for device in ("cpu", "auto"):
        keys = ["train.epochs=1", "train.clip_value=0.1", f"train.device={device}", *keys]
        job = Job(here, configure(folder), folder / device, *keys)
        job.part()
        here.comm.barrier()
        learnt.append(job.final()["model"])
    for name, value in learnt[0].items():
        torch.testing.assert_close(learnt[1][name], value, **tolerance)


if __name__ == "__main__":
    load_simulated()
    hpctrain.init()
    root, *cases = sys.argv[1:]
    for case in cases or ("whole", *CASES):
        if case == "whole":
            goes_on_and_is_used_again(Path(root) / case)
        else:
            learns_as_on_the_cpu(Path(root) / case, *CASES[case])
        if hpctrain.rank() == 0:
            sys.stdout.write(f"{case} holds\n")
