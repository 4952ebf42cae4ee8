"""One process per node watches the start of its ranks, and outlives the rank that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpctrain
from hpctrain.cluster.process import stat
from tests.processes import wait_until

NUM_RANKS = 4
RANK = """
import os, signal, sys, time
from pathlib import Path
from hpctrain.cluster.start_watch import watched_start
with watched_start(%d):
    Path(sys.argv[1], str(os.getpid())).touch()
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.05)
Path(sys.argv[1], "joined-%%d" %% os.getpid()).touch()
time.sleep(60)
"""
LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]],
                     env=os.environ | {"OMPI_COMM_WORLD_RANK": str(rank)})
    for rank in range(%d)
]
print([rank.wait() for rank in ranks])
"""


def watchers(folder: Path) -> list[int]:
    """Return the processes that watch the ranks of a launcher."""
    ranks = {int(file.name) for file in folder.glob("[0-9]*")}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        state = stat(int(entry.name))
        if state is not None and state.parent in ranks and state.state not in ("Z", "X"):
            found += (
                [int(entry.name)] if b"start_watch" in (entry / "cmdline").read_bytes() else []
            )
    return found


@pytest.fixture
def launcher(tmp_path):
    words = [str(tmp_path), RANK % NUM_RANKS]
    line = [sys.executable, "-c", LAUNCHER % NUM_RANKS, *words]
    source = str(Path(hpctrain.__file__).parents[1])
    with subprocess.Popen(
        line,
        env=os.environ | {"PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == NUM_RANKS, 60)
        yield process
        for file in tmp_path.glob("[0-9]*"):
            if stat(int(file.name)) is not None:
                os.kill(int(file.name), signal.SIGKILL)


@pytest.mark.limit(120)
@pytest.mark.parametrize("dies", ["the rank that started it", "another rank"])
def test_one_process_ends_all_ranks_after_the_death_of_any_rank(launcher, tmp_path, dies):
    [watcher] = watchers(tmp_path)
    starter = stat(watcher).parent
    others = {int(file.name) for file in tmp_path.glob("[0-9]*")} - {starter}
    time.sleep(1.0)  # the process has counted all ranks
    os.kill(starter if dies == "the rank that started it" else min(others), signal.SIGKILL)
    out, err = launcher.communicate(timeout=60)
    assert out == f"{[-signal.SIGKILL] * NUM_RANKS}\n"
    assert err.count(f"{NUM_RANKS - 1} of {NUM_RANKS} remain on") == 1
    assert wait_until(lambda: stat(watcher) is None or stat(watcher).state == "Z", 10)


@pytest.mark.limit(120)
@pytest.mark.usefixtures("launcher")
def test_the_process_ends_when_the_ranks_have_joined(tmp_path):
    [watcher] = watchers(tmp_path)
    (tmp_path / "go").touch()
    assert wait_until(lambda: len(list(tmp_path.glob("joined-*"))) == NUM_RANKS, 30)
    assert stat(watcher) is None
