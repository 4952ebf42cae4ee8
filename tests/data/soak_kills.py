"""One rank of two is killed while they write: ``pytest tests/data/soak_kills.py``.

``HPCTRAIN_TEST_KILLS=200`` makes ten kills.
"""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hpctrain.data.writer import write_arrays
from tests.data.rewrite import generation_in
from tests.data.test_kills import KILLS


@pytest.mark.launches
@pytest.mark.parametrize("attempt", range(max(1, KILLS // 20)))
def test_a_killed_rank_leaves_a_whole_data_set(tmp_path, attempt):
    folder = tmp_path / "set"
    random_ = random.Random(attempt)
    command = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--", sys.executable]
    words = ["-m", "tests.data.rewrite", "ranks", str(folder)]
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as job:
        pids = {}
        while len(pids) < 2:
            rank, pid, _ = map(int, job.stdout.readline().split())
            pids[rank] = pid
        time.sleep(random_.uniform(0, 0.5))
        os.kill(pids[random_.randrange(2)], signal.SIGKILL)
        printed = [int(line.split()[-1]) for line in job.stdout.read().splitlines()]
    found = generation_in(folder)
    assert found >= max(printed, default=1)
    write_arrays(folder, {"x": np.arange(3)}, samples_per_shard=3)
    assert len(list(folder.iterdir())) == 2
