"""Torch's own tests of torch.distributed, those in its wheel, on the ranks of a launch.

    hpctrain launch -n 2 -- python -m tests.process_group.torch_suite [--backend gloo]

Prints a line of JSON per test: what became of it on each rank. Torch's harness starts processes of
its own; here the ranks are those of MPI, and each test has a group of its own.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from mpi4py import MPI
from torch.testing._internal.common_utils import TestCase

import hpctrain

TIMEOUT = timedelta(seconds=8)
LIMIT_S = 40


def load(backend: str, world: MPI.Intracomm) -> type:
    """Return the class of the tests, which reads its settings when it is imported."""
    folder = world.bcast(tempfile.mkdtemp())
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(world.size), "TEMP_DIR": folder}
    from torch.testing._internal.distributed import distributed_test  # noqa: PLC0415

    distributed_test.Barrier.init = lambda: None

    # Not by files, which would have to be cleaned between two tests.
    def sync(*_: object, **__: object) -> None:
        request, end = Suite.barriers.Ibarrier(), time.monotonic() + TIMEOUT.total_seconds()
        while not request.Test():
            if time.monotonic() > end:
                raise TimeoutError("the other ranks do not come to the barrier of the test")
            time.sleep(1e-3)

    distributed_test.Barrier.sync = sync
    if world.rank == 0:
        Path(folder, "test_dir").mkdir()

    class Suite(distributed_test.DistributedTest._DistTestBase, TestCase):
        rank = world.rank
        world_size = str(world.size)
        file_name = f"{folder}/file"
        init_method = "env://"
        barriers = world

        def runTest(self) -> None:  # noqa: N802 - unittest's name
            """Nothing: a test is called by its name."""

    return Suite


def outcome(suite: type, name: str, backend: str) -> str:
    """Run one test on this rank."""
    suite.barriers = MPI.COMM_WORLD.Dup()  # one that failed may have left a barrier half done
    signal.alarm(LIMIT_S)
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
        suite.barriers.Barrier()  # nobody ends the store before all have joined
        getattr(suite(), name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as skip:  # how torch skips in processes that it has started
        return "passed" if not skip.code else f"skipped: {skip.code}"
    except BaseException as error:
        return f"failed: {type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed"


def main() -> None:
    """Run the tests, all of them or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hpctrain")
    parser.add_argument("--only", nargs="*", help="names of tests")
    parser.add_argument("--without", nargs="*", default=[], help="names of tests")
    options = parser.parse_args()

    def too_long(*_: object) -> None:
        raise TimeoutError(f"not over after {LIMIT_S} s")

    signal.signal(signal.SIGALRM, too_long)
    hpctrain.init()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    world = MPI.COMM_WORLD.Dup()
    suite = load(options.backend, world)
    names = options.only or [n for n in dir(suite) if n.startswith("test_")]
    for name in names:
        if name not in options.without:
            found = world.allgather(outcome(suite, name, options.backend))
            if world.rank == 0:
                sys.stdout.write(json.dumps([name, found]) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
