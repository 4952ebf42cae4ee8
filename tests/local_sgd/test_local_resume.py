"""A training by rounds that is stopped anywhere and goes on has the bits of one that is not."""

import pytest
import torch

from tests.local_sgd.local_methods import (
    METHODS,
    OPTIMIZERS,
    Normed,
    num_kinds,
    replica_of,
    state_of,
    train,
    weights_of,
)

NUM_STEPS = 18


def stops_of(name: str) -> tuple[int, int]:
    """Return two steps; over all methods every step comes."""
    number = list(METHODS).index(name)
    return number % NUM_STEPS, (number + 7) % NUM_STEPS


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", METHODS)
def test_stop_anywhere_and_go_on_bitwise(hvd_nodes, name):
    make_optimizer = OPTIMIZERS["adam" if "reset" in name or "schedule" in name else "sgd"]
    model = Normed()
    optimizer = make_optimizer(model)
    states = []
    with METHODS[name](hvd_nodes, model, optimizer) as method:
        for step in range(NUM_STEPS):
            states.append(state_of(model, optimizer, method))
            train(hvd_nodes, model, optimizer, method, step, step + 1, observed=True)
        whole = replica_of(model, optimizer)
        facts = method.facts
    for stop in stops_of(name):
        model = Normed()
        optimizer = make_optimizer(model)
        with METHODS[name](hvd_nodes, model, optimizer) as method:
            model.load_state_dict(states[stop]["model"])
            optimizer.load_state_dict(states[stop]["optimizer"])
            method.load_state_dict(states[stop]["method"])
            train(hvd_nodes, model, optimizer, method, stop, NUM_STEPS, observed=True)
            assert torch.equal(replica_of(model, optimizer), whole), stop
            assert method.facts == facts


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", METHODS)
def test_all_ranks_have_one_model_after_the_block(world, hvd_nodes, name):
    model = Normed()
    optimizer = OPTIMIZERS["sgd"](model)
    with METHODS[name](hvd_nodes, model, optimizer) as method:
        train(hvd_nodes, model, optimizer, method, 0, NUM_STEPS - 1)
        own = replica_of(model, optimizer)
        with method.averaged():
            inside = weights_of(model).clone()
        assert torch.equal(own, replica_of(model, optimizer))
        assert num_kinds(world, inside) == 1
    assert num_kinds(world, weights_of(model)) == 1
    assert num_kinds(world, torch.cat([b.double().view(-1) for b in model.buffers()])) == 1
