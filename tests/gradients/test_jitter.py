"""Ranks that come late to barriers and collectives change no bit of what is learnt."""

import pytest
import torch

from hpctrain.compress.codec import Identity
from hpctrain.local_sgd.averaged_tensors import Tensors
from hpctrain.local_sgd.averaging import AnchoredAveraging
from hpctrain.runtime.world import current
from tests.gradients.training import sgd
from tests.local_sgd.local_methods import METHODS, Normed, replica_of, train

ROUNDS = 12


def node_comm():
    here = current()
    return [here.comm.group(ranks) for ranks in here.topology.nodes][here.topology.node]


def squared_distances(rank: int) -> list[float]:
    """Average numbers that other ranks do not have, again and again; how far they were apart."""
    own = torch.zeros(3000, dtype=torch.float64)
    averaging = AnchoredAveraging(
        current().comm,
        Identity(),
        Tensors(lambda: [("own", own)]),
        4096,
        node=node_comm(),
    )
    found = []
    for number in range(ROUNDS):
        own += (rank + 1) * (number + 1) * torch.linspace(0.5, 1.5, 3000, dtype=own.dtype)
        averaging.start(1.0, 1.0 / current().topology.size)
        found.append(averaging.finish())
    return found


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("hvd")
def test_nobody_moves_the_anchor_while_others_still_read_it(world, jitter):
    sleeps = jitter()
    found = squared_distances(world.rank)
    mean = (world.size + 1) / 2
    lines = torch.linspace(0.5, 1.5, 3000, dtype=torch.float64)
    exact = [
        float(((world.rank + 1 - mean) * (number + 1) * lines).square().sum())
        for number in range(ROUNDS)
    ]
    assert found == pytest.approx(exact, rel=1e-9, abs=1e-9)
    assert sleeps.num_sleeps > ROUNDS


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "name", ["local, state averaged", "hierarchical", "diloco, fragments", "staged"]
)
def test_a_local_method_learns_the_same_bits_when_ranks_come_late(hvd_nodes, jitter, name):
    def learnt():
        model = Normed()
        optimizer = sgd(model)
        method = METHODS[name](hvd_nodes, model, optimizer)
        train(hvd_nodes, model, optimizer, method, 0, 13)
        method.finish()
        return replica_of(model, optimizer)

    prompt = learnt()
    jitter()
    assert torch.equal(learnt(), prompt)
