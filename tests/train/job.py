"""Runs in this process, executed in parts, and exact comparisons of two runs."""

import itertools
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from hpctrain.checkpoint.export import newest_state
from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.checkpoint.state_diff import NO_RESULTS, compare
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.keys import render
from hpctrain.core.records import read
from hpctrain.data.loader import Loader
from hpctrain.gradients.reproducible import Reproducible
from hpctrain.runtime.stopping import StopRequests
from hpctrain.train.attempts import RunInDirectory
from hpctrain.train.console import make_console
from hpctrain.train.run_config import RunConfig
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.task import Task, build
from tests.train import problem

WAYS = ("SIGTERM", "SIGUSR1", "SIGINT", "budget", "file STOP")


class Job:
    """A run whose parts are executed one after the other in this process."""

    def __init__(self, here, configure, folder: Path, *overrides: str) -> None:
        self.here = here
        self.directory = RunDirectory(folder)
        self.overrides = [
            "train.epochs=4",
            "train.global_batch=9",  # 6 steps per epoch, the last one with 8 samples
            "log.every_steps=2",
            "optimizer.args.momentum=0.9",
            *overrides,
        ]
        self.config = configure(*self.overrides)

    def built(self, comm=None, *, seed: int = 0) -> Task:
        """Build the task, with random generators seeded differently on every rank."""
        comm = self.here.comm if comm is None else comm
        for generator in (torch.manual_seed, np.random.seed, random.seed):
            generator(seed + comm.rank)
        return build(self.config, comm)

    def part(
        self,
        comm=None,
        *,
        stop: str = "",
        after: int = 0,
        on_rank: int = 0,
        fail: bool = False,
        at: Mapping[int, Callable[[], object]] | None = None,
        task: Task | None = None,
    ):
        """Train until the end, or until the stop requested in step ``after`` of this part.

        Collective.

        Args:
            comm: ranks that train; None means all.
            stop: method of the request, one of ``WAYS``.
            after: step of this part.
            on_rank: rank that gets the request.
            fail: raise ``KeyError`` on every rank instead.
            at: functions to call before optimizer steps, by step of this part.
            task: result of ``built()``; None builds one.
        """
        comm = self.here.comm if comm is None else comm
        task = self.built(comm, seed=after) if task is None else task
        now, steps, actions = [0.0], itertools.count(1), dict(at or {})
        if fail:
            actions[after] = _fail
        elif comm.rank == on_rank and stop:
            actions[after] = lambda: self._ask(stop, now)
        task.optimizer.register_step_pre_hook(lambda *_: actions.get(next(steps), _pass)())
        is_root = comm.rank == 0
        with StopRequests(
            stop_file=self.directory.stop if is_root else None,
            deadline=50.0 if is_root else None,
            look_s=0.0,
            clock=lambda: now[0],
        ) as requests:
            run = RunInDirectory(task, self.directory, make_console(shown=False))
            continues = comm.broadcast_object(self.directory.is_used())
            return run.carry_out(render(self.config), requests, continues=continues)

    def _ask(self, way: str, now: list[float]) -> None:
        if way == "budget":
            now[0] = 100.0
        elif way == "file STOP":
            self.directory.stop.touch()
        else:
            os.kill(os.getpid(), signal.Signals[way])

    def curve(self) -> list[tuple]:
        """Return the records without times."""
        names = ("event", "step", "epoch", "lr", "loss", "metric", "state_hash", "noise_scale")
        return [
            tuple(record.get(name) for name in names)
            for record in read(self.directory.metrics)
            if record["event"] in ("step", "test", "hash", "finished")
        ]

    def final(self):
        return newest_model(self.directory.path)


def newest_model(run: Path) -> dict[str, object]:
    """Return model and optimizer state of the newest checkpoint of a run."""
    _, state = newest_state(run)
    names = ("model", "optimizer", "epoch", "step", "precision", "ema", "best")
    return {name: state[name] for name in names if name in state}


def _fail() -> None:
    raise KeyError("power")


def _pass() -> None:
    pass


def assert_same_run(one: Job, other: Job) -> None:
    one.here.comm.barrier()
    assert one.curve() == other.curve()
    assert_same_bits(one.final(), other.final())


def assert_same_checkpoint(one: Job, other: Job) -> None:
    """Check that two checkpoints differ only in fields that are not results."""
    found = compare(one.directory.path, other.directory.path)
    assert [each.text for each in found if each.what not in NO_RESULTS] == []


def assert_same_bits(one, other) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same_bits(one[name], other[name])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same_bits(mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    else:
        assert one == other


def train_alone(config: RunConfig, task: Task, *, is_fixed: bool = False):
    """Train with a plain loop in this process, with ``Reproducible`` if ``is_fixed``.

    Returns:
        The model, the loss of each step, and the state hash after each step.
    """
    torch.manual_seed(config.seed)
    plain = problem.model(**config.model.args)
    optimizer = getattr(torch.optim, config.optimizer.name)(
        plain.parameters(), lr=config.optimizer.lr, **config.optimizer.args
    )
    how = {"num_micro_shards": config.train.micro_shards, "seed": config.seed}
    steps = Reproducible(plain, optimizer, SerialCommunicator(), **how) if is_fixed else None
    loader = Loader(
        task.train.dataset,
        global_batch=config.train.global_batch,
        order=config.data.order,
        seed=config.seed,
        rank=0,
        size=1,
    )
    losses, hashes = [], []
    for batch in itertools.chain.from_iterable(itertools.repeat(loader, config.train.epochs)):
        optimizer.param_groups[0]["lr"] = config.optimizer.lr * task.schedule(len(losses))
        if steps is not None:
            loss_of = lambda part: functional.cross_entropy(plain(part[0]), part[1])  # noqa: E731
            loss = steps.backward((batch.x, batch.y), loss_of, num_samples=len(batch.x))
        else:
            optimizer.zero_grad()
            mean = functional.cross_entropy(plain(batch.x), batch.y)
            mean.backward()
            loss = mean.item()
        if config.train.clip_norm:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), config.train.clip_norm)
        optimizer.step()
        # the same rounding as in records, which store a sum and divide it
        losses.append(loss * len(batch.x) / len(batch.x))
        parameters = dict(plain.named_parameters())
        hashes.append(state_hash({"model": parameters, "optimizer": optimizer.state_dict()}))
    return plain, losses, hashes
