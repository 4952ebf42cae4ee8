"""Who leaves the block of a local method by an error does not leave the others waiting."""

import time

import pytest

from hpctrain.core.errors import RankLostError
from tests.gradients.training import make_model, sgd
from tests.local_sgd.local_methods import num_kinds, train, weights_of

MANY = pytest.mark.ranks(2, 3)
pytestmark = pytest.mark.usefixtures("last")


@MANY
def test_an_error_of_one_rank_is_soon_an_error_of_all(world, hvd_nodes):
    start = time.monotonic()
    model = make_model()
    optimizer = sgd(model)

    def run() -> None:
        with hvd_nodes.LocalSGD(model, optimizer, 4) as method:
            for step in range(4):
                if step == 2 and world.rank == 1:
                    raise ZeroDivisionError("no samples")
                train(hvd_nodes, model, optimizer, method, step, step + 1)

    expected = ZeroDivisionError if world.rank == 1 else RankLostError
    with pytest.raises(expected, match="no samples") as caught:
        run()
    if world.rank != 1:
        assert "rank 1 has left a block of LocalSGD by ZeroDivisionError" in str(caught.value)
    assert time.monotonic() - start < 30


@MANY
def test_blocks_that_all_leave_by_errors_disturb_no_later_one(world, hvd_nodes):
    def fail(step: int) -> None:
        with hvd_nodes.LocalSGD(make_model(), sgd(make_model()), 4):
            raise ZeroDivisionError(step)

    for step in range(3):
        with pytest.raises(ZeroDivisionError):
            fail(step)
    time.sleep(2.1)
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.LocalSGD(model, optimizer, 2) as method:
        train(hvd_nodes, model, optimizer, method, 0, 3)
    assert num_kinds(world, weights_of(model)) == 1
