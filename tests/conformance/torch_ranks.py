"""Pytest plugin: torch's tests of several processes run on the ranks of a launch.

    hpctrain launch -n 4 -- python -m pytest --noconftest -p tests.conformance.torch_ranks \
        DIR/test/distributed/tensor/test_redistribute.py

Torch's harness starts processes for each test; with this plugin, the ranks replace these
processes. The backend hpctrain replaces gloo, unless ``TORCH_SUITE_BACKEND=gloo`` is set. Tests
for another number of processes and tests without processes are left out.
"""

import inspect
import multiprocessing
import os
import re
import tempfile
import unittest
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import device_mesh, distributed_c10d

import hpctrain
from tests.conformance.launches import TORCH_BACKEND

WORLD = MPI.COMM_WORLD.Dup()
BACKEND = os.environ.get(TORCH_BACKEND, "hpctrain")

hpctrain.init()
for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"):
    os.environ.pop(name, None)
# What distributed_test reads when it is imported.
os.environ |= {"WORLD_SIZE": str(WORLD.size), "INIT_METHOD": f"file://{Path.cwd()}/init"}
GLOO = os.environ.setdefault("BACKEND", "gloo")

from torch.testing._internal import common_distributed as harness  # noqa: E402 - reads them too
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import (  # noqa: E402
    RpcAgentTestFixture,
)


def _for_gloo(function: Callable[..., Any], *backends: str | None) -> None:
    """Make a function that creates groups use hpctrain for ``backends``."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        is_for_all = given.get("world_size", -1) in (-1, WORLD.size)
        if given.get("backend") in backends and is_for_all:
            given["backend"] = BACKEND
        return function(**given)

    for module in (dist, distributed_c10d, device_mesh):
        if hasattr(module, function.__name__):
            setattr(module, function.__name__, call)


if BACKEND != "gloo":
    _for_gloo(dist.init_process_group, GLOO, f"cpu:{GLOO}", None)
    _for_gloo(dist.new_group, GLOO, f"cpu:{GLOO}")


@contextmanager
def _as_process() -> Generator[Any]:
    """Act as the process of a test; yield a pipe for its messages to the parent."""
    output, pipe = multiprocessing.Pipe(duplex=False)
    skips = {skip.exit_code: skip.message for skip in harness.TEST_SKIPS.values()}
    try:
        yield pipe
    except SystemExit as end:
        if end.code in skips:
            raise unittest.SkipTest(skips[end.code]) from None
        if end.code:
            text = output.recv() if output.poll() else f"it ended with exit code {end.code}"
            errors = re.findall(r"^\w\S*(?:Error|Exception)\b.*", text, re.MULTILINE)
            raise AssertionError("\n".join([*errors[-1:], text])) from None
    finally:
        torch.set_default_device(None)


def _run_together(run: Callable[[Any], object]) -> unittest.SkipTest | None:
    """Run a test, and return when all ranks have finished it; a failed rank ends the launch."""
    skip: unittest.SkipTest | None = None
    try:
        with _as_process() as pipe:
            run(pipe)
    except unittest.SkipTest as error:
        skip = error
    WORLD.Barrier()  # no rank removes a file, or the store, while others read it
    return skip


def _shared_file() -> str:
    return WORLD.bcast(tempfile.mktemp())


# Cases that start processes for each test


def _start_processes(case: Any, _: object) -> None:
    case.file_name = _shared_file()
    for variable in ("TEMP_DIR", "INIT_METHOD"):
        os.environ[variable] = WORLD.bcast(os.environ.get(variable, ""))


def _join_processes(case: Any, _: object) -> None:
    test = case._current_test_name()
    skip = _run_together(lambda pipe: case._run(WORLD.rank, test, case.file_name, pipe))
    if dist.is_initialized():
        dist.destroy_process_group()
    if skip is not None:
        raise skip


OneByOne = harness.MultiProcessTestCase
OneByOne._start_processes, OneByOne._join_processes = _start_processes, _join_processes

# Cases whose processes stay for all tests

Staying = harness.MultiProcContinuousTest


def _begin(cls: Any, world_size: int) -> None:
    cls.processes, cls.task_queues, cls.completion_queues = [], [], []
    cls.rank, cls.world_size, cls.rdvz_file = WORLD.rank, world_size, _shared_file()
    cls.skip = _run_together(lambda _: cls._init_pg(cls.rank, world_size, cls.rdvz_file))


def _run_or_wait(case: Any, function: Callable[[], object]) -> Any:
    @wraps(function)
    def call() -> None:
        if case.rank != case.MAIN_PROCESS_RANK:
            function()
        elif skip := case.skip or _run_together(lambda _: case._run_test_given_id(case.id())):
            raise skip

    return call


_end_of_torch = Staying.tearDownClass.__func__


def _end(cls: Any) -> None:
    if cls._processes_spawned:
        WORLD.Barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    _end_of_torch(cls)


Staying._spawn_processes, Staying.tearDownClass = classmethod(_begin), classmethod(_end)
Staying._worker_run_main_wait = _run_or_wait


def _has_a_process_for_each_rank(item: pytest.Item) -> bool:
    cls = getattr(item, "cls", None)
    if cls is None or not issubclass(cls, (OneByOne, Staying)):
        return False
    size = inspect.getattr_static(cls, "world_size")
    try:
        number = size.fget(object.__new__(cls)) if isinstance(size, property) else size
    except AttributeError:  # of an object that setUp makes
        return True
    return int(number) == WORLD.size


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deselect tests for another number of processes, or without processes."""
    items[:] = [item for item in items if _has_a_process_for_each_rank(item)]


_has_run: set[bool] = set()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the session before a second test with RPC: a process can use RPC only once."""
    has_rpc = issubclass(item.cls, RpcAgentTestFixture)
    if has_rpc and has_rpc in _has_run:
        WORLD.Barrier()  # all ranks have written the outcome of the previous test
        os._exit(0)
    _has_run.add(has_rpc)
    return (yield)
