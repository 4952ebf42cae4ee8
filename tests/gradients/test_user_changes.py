"""Whatever a program does to gradients, parameters, wraps and steps: the average, or an error.

Each case is a short program. All ranks run it, and one process runs its counterpart on the whole
batch; afterwards the weights are the same on all ranks and those of the one process, or every rank
has raised the same error.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hpctrain
from hpctrain.core.errors import HpctrainError
from tests.gradients import cases_of_gradients, cases_of_parameters
from tests.gradients.cases import CAN, CASES, OPS, REFUSED, Side

assert cases_of_gradients, cases_of_parameters  # they enter their cases

SIZES = pytest.mark.ranks(2, 3)


def finish(side: Side) -> list[Tensor]:
    """Take one more step, so that what has parted before is found; return the weights."""
    if side.net.body.weight.dtype is torch.float64:
        for p in side.net.parameters():
            p.requires_grad_()
        side.step(9)
    return [p.detach().clone() for p in side.net.parameters()]


@pytest.fixture(scope="module", params=["thread", "end"])
def hvd(request):
    """Initialise a world for all cases of one overlap: after an error the next case goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_OVERLAP", request.param)
        patch.setenv("HPCTRAIN_BUCKET_BYTES", "64 B")
        hpctrain.init(ranks_per_node=2)
        yield hpctrain
        hpctrain.shutdown()


@SIZES
@pytest.mark.parametrize(("name", "op"), [(name, op) for name in CASES for op in CAN[name]])
def test_a_change_ends_with_the_average_everywhere(hvd, world, name, op):
    how = getattr(hvd, op)
    side = Side(hvd.rank(), hvd.size(), lambda o: hvd.DistributedOptimizer(o, op=how), 1)
    alone = Side(0, 0, lambda o: o, hvd.size() if op == "Sum" else 1)
    error: HpctrainError | None = None
    for one in (side, alone):
        one.step(7)  # learns how often hooks fire, so that later ones travel early
        one.step(8)
    try:
        CASES[name](side)
        weights = finish(side)
    except HpctrainError as caught:
        error = caught
    kinds = world.allgather(type(error).__name__)
    assert len(set(kinds)) == 1, f"{kinds}: {error}"
    assert (error is not None) == (name in REFUSED), error
    if error is not None:
        return
    CASES[name](alone)
    expected = finish(alone)
    for mine, wanted in zip(weights, expected, strict=True):
        tolerance = 1e-5 if "single" in name or "swapped_by" in name or "double" in name else 1e-9
        torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
    assert (
        len(
            {
                tuple(map(tuple, w.flatten(1).tolist())) if w.dim() > 1 else tuple(w.tolist())
                for w in world.allgather(weights[0])
            }
        )
        == 1
    )


# --- what only some ranks do ---

PARTINGS: dict[str, Callable[[Side], None]] = {}


def parting(function: Callable[[Side], None]) -> Callable[[Side], None]:
    PARTINGS[function.__name__] = function
    return function


@parting
def drops_one(side):
    side.backward()
    if side.rank == 0:
        side.net.head.weight.grad = None
    side.optimizer.step()


@parting
def replaces_one(side):
    side.backward()
    if side.rank == 0:
        side.net.head.weight.grad = torch.ones_like(side.net.head.weight)
    side.optimizer.step()


@parting
def changes_one_in_place(side):
    side.backward()
    if side.rank == 0:
        side.net.head.weight.grad.mul_(2)
    side.optimizer.step()


@parting
def edits_a_weight(side):
    with torch.no_grad():
        side.net.body.weight[0] += side.rank
    side.step()


@parting
def steps_without_a_backward(side):
    if side.rank == 0:
        side.optimizer.step()
    else:
        side.step()


@parting
def leaves_a_step_out(side):
    side.backward()
    if side.rank:
        side.optimizer.step()


@parting
def runs_backward_once_more(side):
    side.backward()
    if side.rank == 0:
        side.backward(1)
    side.optimizer.step()


@parting
def has_another_learning_rate(side):
    side.optimizer.param_groups[0]["lr"] = 0.1 * (1 + side.rank)
    side.step()


@parting
def freezes(side):
    if side.rank == 0:
        side.net.head.requires_grad_(False)
    side.step()


@parting
def converts(side):
    if side.rank == 0:
        side.net.float()
    side.step()


@parting
def loads_other_state(side):
    if side.rank == 0:
        state = copy.deepcopy(side.optimizer.state_dict())
        for values in state["state"].values():
            values["momentum_buffer"] += 1
        side.optimizer.load_state_dict(state)
    side.step()


@parting
def replaces_a_sum_then_goes_on(side):
    side.backward()
    side.net.head.weight.grad = torch.full_like(side.net.head.weight, float(side.rank))
    side.optimizer.step()


@SIZES
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", PARTINGS)
def test_what_only_some_ranks_do_is_an_error_on_all_or_has_no_effect(hvd, world, name, op):
    how = getattr(hvd, op)
    side = Side(hvd.rank(), hvd.size(), lambda o: hvd.DistributedOptimizer(o, op=how), 1)
    error: HpctrainError | None = None
    try:
        side.step(7)
        side.step(8)
        PARTINGS[name](side)
        for batch in range(3):
            side.step(batch)
    except HpctrainError as caught:
        error = caught
    kinds = world.allgather(type(error).__name__)
    assert len(set(kinds)) == 1, f"{kinds}: {error}"
    if error is None:
        weights = world.allgather([p.detach().clone() for p in side.net.parameters()])
        for others in weights:
            for mine, other in zip(weights[0], others, strict=True):
                assert torch.equal(mine, other)
