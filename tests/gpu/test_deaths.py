"""Check that the death of a rank in an accelerator sum ends the job and is reported."""

import pytest

from tests.runtime.victims import run_ranks

BODY = """
from torch import nn
from hpctrain.comm import bucket_storage
from tests.stand_in import StandIn

bucket_storage.device_of = StandIn
model = nn.Sequential(nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 300))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
hvd.broadcast_parameters(model.state_dict())
(bucket,) = {{type(b.place): b for b in optimizer._exchange.reduction.layout.buckets}}.values()
assert type(bucket.place).__name__ == "PeerBucket"
steps, {when} = [], bucket.place.{when}

def die(*given):
    if steps[-1] == 3 and rank == 1:
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    return {when}(*given)

bucket.place.{when} = die
for step in range(20):
    steps.append(step)
    optimizer.zero_grad()
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.launches
@pytest.mark.parametrize("when", ["depart", "_sum_slice"])
def test_death_of_a_rank_in_an_accelerator_sum_ends_the_job(tmp_path, when):
    ended = run_ranks(tmp_path, BODY.format(when=when), num_ranks=3)
    assert ended.code != 0
    assert ended.seconds < 30
    assert not ended.left_over
    assert "rank 1" in ended.err + "".join(ended.logs.values())
