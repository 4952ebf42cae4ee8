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


def stop_of(name: str) -> int:
    """Return a step; over all methods every other one comes, and more."""
    return (5 * list(METHODS).index(name) + 2) % NUM_STEPS


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", METHODS)
def test_stop_anywhere_and_go_on_bitwise_and_have_one_model_after_the_block(
    world, hvd_nodes, name
):
    make_optimizer = OPTIMIZERS["adam" if "reset" in name or "schedule" in name else "sgd"]
    found, state = [], {}
    for first in (0, stop_of(name)):
        model = Normed()
        optimizer = make_optimizer(model)
        with METHODS[name](hvd_nodes, model, optimizer) as method:
            if state:
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                method.load_state_dict(state["method"])
            for step in range(first, NUM_STEPS):
                if step == stop_of(name):
                    state = state_of(model, optimizer, method)
                train(hvd_nodes, model, optimizer, method, step, step + 1, observed=True)
            found.append((replica_of(model, optimizer), method.facts))
            with method.averaged():
                inside = weights_of(model).clone()
            assert torch.equal(found[-1][0], replica_of(model, optimizer))
            assert num_kinds(world, inside) == 1
        assert num_kinds(world, weights_of(model)) == 1
        assert num_kinds(world, torch.cat([b.double().view(-1) for b in model.buffers()])) == 1
    (whole, facts), (again, same_facts) = found
    assert torch.equal(whole, again)
    assert facts == same_facts
