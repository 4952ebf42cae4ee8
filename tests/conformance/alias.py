"""Pytest plugin: what Horovod's tests import under its names is hpctrain's.

    pytest -p tests.conformance.alias DIR/test/parallel/test_torch.py

The shim has Horovod's modules. What is added here are two names that its tests take from
elsewhere, for their own bookkeeping.
"""

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import hpctrain.horovod.shim


def in_thread(target: Callable[[], object]) -> threading.Thread:
    """Run something in a thread."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def install() -> None:
    """Install the shim, and put those names where imports look first."""
    hpctrain.horovod.shim.install()
    threads = ModuleType("horovod.runner.util.threads")
    vars(threads).update(in_thread=in_thread)
    sys.modules.setdefault(threads.__name__, threads)
    sys.modules.setdefault("mock", mock)


install()
