"""Check that a rank of ``shard="node"`` killed during an update leaves no partial step.

By default ten runs are killed and resumed; ``TEST_KILLS=50`` sets the number to 50.
"""

import os

import pytest
import torch

from tests.runtime.victims import run_ranks

pytestmark = pytest.mark.requires("own-engine")

BODY = """
from torch import nn
from hpctrain.checkpoint import Manager
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.runtime.world import current

VICTIM, AT_STEP, AT_CHUNK = {victim}
torch.manual_seed(0)
# Large enough that each rank steps in three chunks.
model = nn.Sequential(nn.Linear(900, 1000), nn.Tanh(), nn.Linear(1000, 900))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard="node")
manager = Manager(HERE / "checkpoints", current().comm, every=2)
first = 0
if (loaded := manager.load_latest()) is not None:
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    first = loaded.step
whole, seen = optimizer._exchange._rule.step, []

def dying(groups):
    seen.append(step)
    if (rank, step) == (VICTIM, AT_STEP) and seen.count(step) == AT_CHUNK:
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    whole(groups)

optimizer._exchange._rule.step = dying
try:
    for step in range(first, 24):
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 900, generator=source)).square().mean().backward()
        optimizer.step()
        state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
        if manager.due(step + 1):
            manager.save(state, step + 1)
except RankLostError:
    try:
        optimizer.state_dict()
    except CommError:
        spoilt = all(p.isnan().all() for p in model.parameters())
        (HERE / f"spoilt-{{AT_STEP}}-{{rank}}").write_text(str(spoilt))
    raise
manager.close()
if rank == 0:
    torch.save(model.state_dict(), HERE / "end.pt")
"""


INTERRUPTED = """
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW((model := torch.nn.Linear(300, 100)).parameters(), lr=0.01), shard="node"
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 300)).square().mean().backward()
    if step and rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(step * rank)
    try:
        optimizer.step()
    except KeyboardInterrupt:
        time.sleep(1.5)  # rank 1 updates its slice
        assert all(p.isnan().all() for p in model.parameters())
        optimizer.state_dict()
"""


KILLS = int(os.environ.get("TEST_KILLS", "10"))
_OF_A_RUN = 10


@pytest.mark.launches
def test_rank_interrupted_before_its_update_has_no_partial_step(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_OVERLAP", "thread")
    outcome = run_ranks(tmp_path, INTERRUPTED)
    assert "restart from a checkpoint" in outcome.err
    assert not outcome.left_over


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.limit(900)
@pytest.mark.parametrize("run", range(-(-KILLS // _OF_A_RUN)))
def test_run_with_ranks_killed_during_updates_ends_with_the_same_bits(tmp_path, run):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for folder in (alone, killed):
        folder.mkdir()
    assert run_ranks(alone, BODY.format(victim=(-1, 0, 0))).code == 0
    for number in range(min(_OF_A_RUN, KILLS - run * _OF_A_RUN)):
        step = 3 + 2 * number
        victim = ((number + run) % 2, step, 1 + (number + run) % 3)
        outcome = run_ranks(killed, BODY.format(victim=victim))
        assert outcome.code != 0
        assert not outcome.left_over
        for file in killed.glob(f"spoilt-{step}-*"):
            assert file.read_text() == "True"
    assert list(killed.glob("spoilt-*"))
    assert run_ranks(killed, BODY.format(victim=(-1, 0, 0))).code == 0
    ends = [torch.load(folder / "end.pt") for folder in (alone, killed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
