"""Compare the results of calls with parameters on the accelerator of torch and on the CPU.

Usage: ``calls.py FOLDER [NAME ...]``, started by any launcher.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain as hvd
from hpctrain.checkpoint import load, save
from hpctrain.checkpoint.manager import Manager
from hpctrain.elastic import TorchState
from hpctrain.runtime.world import current
from tests.gradients.training import global_batch, make_model, part_of
from tests.local_sgd.local_methods import METHODS

Found = list[Tensor]


def plain(device: torch.device) -> tuple[nn.Module, torch.optim.SGD]:
    model = make_model(torch.float32).to(device)
    # A simulated device does not support all operations on several tensors.
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)


def learn(model: nn.Module, optimizer, steps: range) -> None:
    device = next(model.parameters()).device
    for step in steps:
        part = part_of(global_batch(step, torch.float32), hvd.rank(), hvd.size())
        images, labels = (values.to(device) for values in part)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


def by_local_methods(device: torch.device, _: Path) -> Found:
    found: Found = []
    for name in ("local, state averaged", "local, bf16", "diloco, fragments", "staged"):
        model, optimizer = plain(device)
        with METHODS[name](hvd, model, optimizer) as method:
            learn(model, optimizer, range(5))
            with method.averaged():
                found += [p.detach().clone() for p in model.parameters()]
            learn(model, optimizer, range(5, 16))
        found += [*model.state_dict().values()]
    return found


def by_adasum(device: torch.device, _: Path) -> Found:
    model, optimizer = plain(device)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named, hvd.Compression.fp16, op=hvd.Adasum)
    hvd.broadcast_parameters(model.state_dict())
    learn(model, optimizer, range(3))
    return [*model.state_dict().values()]


def normalised(device: torch.device, _: Path) -> Found:
    norm = hvd.SyncBatchNorm(4).to(device)
    generator = torch.Generator().manual_seed(hvd.rank())
    x = torch.randn(3 + hvd.rank(), 4, 5, generator=generator).to(device).requires_grad_()
    out = norm(x)
    (out * out.detach().roll(1, 0)).sum().backward()
    return [out.detach(), x.grad, norm.weight.grad, norm.running_mean, norm.running_var]


def joined(device: torch.device, _: Path) -> Found:
    model, optimizer = plain(device)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    learn(model, optimizer, range(2 + hvd.rank()))
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    learn(model, optimizer, range(1))
    return [*model.state_dict().values()]


def restored(device: torch.device, _: Path) -> Found:
    model, optimizer = plain(device)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = TorchState(model, optimizer, epoch=0)
    state.sync()
    learn(model, optimizer, range(2))
    state.commit()
    learn(model, optimizer, range(2, 4))
    state.restore()
    learn(model, optimizer, range(2, 3))
    return [*model.state_dict().values()]


def kept(device: torch.device, folder: Path) -> Found:
    """Save checkpoints of pinned and of ordinary tensors, in the background and synchronously."""
    comm, found, busy = current().comm, list[Tensor](), torch.zeros(700, 700, device=device)
    for background in (True, False):
        manager = Manager(folder / f"{device.type}-{background}", comm, background=background)
        for step in (1, 2):  # into the memory of the first step
            state = {"x": torch.full((1 << 20,), float(step), device=device)}
            for _ in range(4 if device.type != "cpu" else 0):
                busy @= busy  # the copy has not completed yet
            state["x"] += busy[0, 0]
            own = {"y": torch.arange(7.0, device=device) + hvd.rank()}
            manager.save(state, step, own)
            state["x"].zero_()
        manager.close()
        loaded = manager.load_latest()
        found += [loaded.state["x"], loaded.private[hvd.rank()]["y"]]
    save(folder / f"{device.type}", {"x": torch.ones(9, device=device)}, comm, step=3)
    return [*found, load(folder / f"{device.type}", comm).state["x"]]


PROGRAMS: dict[str, Callable[[torch.device, Path], Found]] = {
    "local": by_local_methods,
    "adasum": by_adasum,
    "norm": normalised,
    "join": joined,
    "elastic": restored,
    "checkpoints": kept,
}


def load_simulated() -> None:
    """Load the accelerator of ``MCPU_SITE`` into torch, if the variable is set."""
    if site := os.environ.get("MCPU_SITE"):
        sys.path.insert(0, site)
        importlib.import_module("torch_mcpu")


if __name__ == "__main__":
    load_simulated()
    hvd.init()
    root, *names = sys.argv[1:]
    here = torch.accelerator.current_accelerator()
    for name in names or PROGRAMS:
        on_cpu, there = (PROGRAMS[name](each, Path(root)) for each in (torch.device("cpu"), here))
        for expected, value in zip(on_cpu, there, strict=True):
            torch.testing.assert_close(value.cpu(), expected, rtol=1e-3, atol=1e-4)
        if hvd.rank() == 0:
            sys.stdout.write(f"{name} holds\n")
            sys.stdout.flush()
