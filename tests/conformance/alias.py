"""Pytest plugin: what Horovod's tests import under its names is hpctrain's.

    pytest -p tests.conformance.alias DIR/test/parallel/test_torch.py

``horovod.torch`` is hpctrain itself, so a name that it lacks is missing there as well. The rest
are the few names that the tests take from other modules of Horovod, for their own bookkeeping.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from unittest import mock

import hpctrain


def env(**variables: str | None) -> AbstractContextManager[object]:
    """Set environment variables for a while; None leaves one alone."""
    given = {name: value for name, value in variables.items() if value is not None}
    return mock.patch.dict(os.environ, given)


def in_thread(target: Callable[[], object]) -> threading.Thread:
    """Run something in a thread."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def make_module(module_name: str, **names: object) -> ModuleType:
    """Make a module of these names."""
    made = ModuleType(module_name)
    vars(made).update(names)
    return made


def install() -> None:
    """Put the modules where imports look first."""
    modules = {
        "horovod": make_module("horovod", torch=hpctrain),
        "horovod.torch": hpctrain,
        "horovod.torch.mpi_ops": hpctrain,
        "horovod.common.util": make_module("horovod.common.util", env=env),
        "horovod.runner.util.threads": make_module("threads", in_thread=in_thread),
    }
    sys.modules.update(modules)
    sys.modules.setdefault("mock", mock)


install()
