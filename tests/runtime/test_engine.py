"""The engine selected in ``init``, and the end of ranks that use Horovod's engine."""

import signal
from pathlib import Path

import pytest
import torch

import hpctrain
from hpctrain.runtime import world as worlds
from tests.runtime.victims import run_ranks

ENDS = {
    "a word": "sys.exit(3)",
    "a signal": f"os.kill(os.getpid(), {int(signal.SIGTERM)})",
}


@pytest.mark.ranks(2, 4)
@pytest.mark.requires("horovod")
def test_init_sets_the_engine_of_the_plan(world):
    hpctrain.init(engine="horovod")
    assert worlds.current().plan.engine == "horovod"
    mean = hpctrain.allreduce(torch.full((3,), float(world.rank)), name="x")
    assert mean.tolist() == [(world.size - 1) / 2] * 3
    hpctrain.shutdown()
    hpctrain.init(engine="hpctrain")
    assert worlds.current().plan.engine == "hpctrain"
    hpctrain.shutdown()


@pytest.mark.launches
@pytest.mark.limit(150)
@pytest.mark.requires("horovod")
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_one_rank_ends_all_ranks_with_horovods_engine(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_ENGINE", "horovod")
    outcome = run_ranks(tmp_path, f"if rank == 1:\n    now()\n    {ENDS[end]}\ntrain()")
    assert outcome.code != 0
    assert outcome.seconds < 10
    assert not outcome.left_over
