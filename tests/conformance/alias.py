"""Pytest plugin: imports of Horovod in Horovod's tests import hpctrain instead.

    pytest -p tests.conformance.alias DIR/test/parallel/test_torch.py

The shim provides Horovod's modules. This plugin adds two modules that the tests also import.
"""

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from unittest import mock

import hpctrain.horovod.shim


def in_thread(target: Callable[[], object]) -> threading.Thread:
    """Run a function in a daemon thread."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def install() -> None:
    """Install the shim, and add the two modules to ``sys.modules``."""
    hpctrain.horovod.shim.install()
    threads = ModuleType("horovod.runner.util.threads")
    vars(threads).update(in_thread=in_thread)
    sys.modules.setdefault(threads.__name__, threads)
    sys.modules.setdefault("mock", mock)


install()
