"""Run every test on the numbers of ranks that it names; see ``harness/``."""

import os
import signal
from collections.abc import Generator
from types import ModuleType

import pytest

import hpctrain
from hpctrain.core import config

pytest_plugins = ["tests.harness.plugin", "tests.power_loss"]

# Tests do not measure the machine at ``hpctrain.init``: they are fast, equal on every machine, and
# write nothing to the user's cache.
os.environ["HPCTRAIN_PROBE"] = "off"

# With any of these variables, help texts are coloured even without a terminal.
for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(name, None)

# In the background, or under nohup, these signals are ignored, also by the programs of tests,
# which send the signals. A handler is not inherited: these programs get the default action.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Use a cache folder of the test session."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr(config, "cache_folder", lambda: folder)


@pytest.fixture
def hvd() -> Generator[ModuleType]:
    """Initialize the world, and shut it down after the test."""
    hpctrain.init()
    yield hpctrain
    hpctrain.shutdown()


@pytest.fixture
def gloo(world, tmp_path):
    """Start torch's process group, on the same ranks."""
    import torch.distributed as dist  # noqa: PLC0415 - few tests want it

    file = world.bcast(str(tmp_path / "store"))
    store = dist.FileStore(file, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    yield
    dist.destroy_process_group()
