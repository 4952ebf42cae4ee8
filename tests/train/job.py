"""Runs in this process, in parts, and whether two of them are the same bit for bit."""

import itertools
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from hpctrain.checkpoint.tools.export import newest_state
from hpctrain.runtime.stopping import StopRequests
from hpctrain.train.attempts import RunInDirectory
from hpctrain.train.console import make_console
from hpctrain.train.keys import render
from hpctrain.train.metrics import read
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.task import build

WAYS = ("SIGTERM", "SIGUSR1", "SIGINT", "budget", "file STOP")


class Job:
    """A run whose parts are carried out one after the other in this process."""

    def __init__(self, here, configure, folder: Path, *overrides: str) -> None:
        self.here = here
        self.directory = RunDirectory(folder)
        self.overrides = [
            "train.epochs=4",
            "train.global_batch=9",  # 6 steps per epoch, the last one of 8 samples
            "log.every_steps=2",
            "optimizer.args.momentum=0.9",
            *overrides,
        ]
        self.config = configure(*self.overrides)

    def part(
        self,
        comm=None,
        *,
        stop: str = "",
        after: int = 0,
        on_rank: int = 0,
        fail: bool = False,
        at: Mapping[int, Callable[[], object]] | None = None,
    ):
        """Train until the end, or until a stop that is asked for in the step ``after``.

        Args:
            comm: of the ranks that train; all of them when None.
            stop: one of ``WAYS``.
            after: which step of this part.
            on_rank: who asks.
            fail: whether every rank fails instead.
            at: what else happens before the optimizer steps, by step of this part.
        """
        comm = self.here.comm if comm is None else comm
        for generator in (torch.manual_seed, np.random.seed, random.seed):
            generator(after + comm.rank)  # another process has other states
        task = build(self.config, comm)
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
            run = RunInDirectory(task, self.directory, comm, make_console(shown=False))
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
        """Everything of the records that is no time."""
        names = ("event", "step", "epoch", "lr", "loss", "metric", "state_hash")
        return [
            tuple(record.get(name) for name in names)
            for record in read(self.directory.metrics)
            if record["event"] in ("step", "test", "hash", "finished")
        ]

    def final(self):
        return newest_model(self.directory.path)


def newest_model(run: Path) -> dict[str, object]:
    """Return what a run has learnt, of its newest checkpoint."""
    _, state = newest_state(run)
    return {name: state[name] for name in ("model", "optimizer", "epoch", "step")}


def _fail() -> None:
    raise KeyError("power")


def _pass() -> None:
    pass


def assert_same_run(one: Job, other: Job) -> None:
    one.here.comm.barrier()
    assert one.curve() == other.curve()
    assert_same_bits(one.final(), other.final())


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
