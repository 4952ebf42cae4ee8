"""Check that any change to gradients, parameters, wraps and steps gives the average, or an error.

Each case is a short program. All ranks run it, and one process runs its counterpart on the whole
batch. Afterwards the weights of all ranks equal those of the one process, or every rank has raised
the same error.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import hpctrain
from hpctrain.core.errors import HpctrainError, MismatchError
from tests.gradients import cases_of_gradients, cases_of_parameters
from tests.gradients.cases import CAN, CASES, OPS, REFUSED, Side

assert cases_of_gradients, cases_of_parameters  # importing them registers the cases

SIZES = pytest.mark.ranks(2, 3)


def finish(side: Side) -> list[Tensor]:
    """Take one more step, which detects diverged ranks, and return the weights."""
    if side.net.body.weight.dtype is torch.float64:
        for p in side.net.parameters():
            p.requires_grad_()
        side.step(9)
    return [p.detach().clone() for p in side.net.parameters()]


@pytest.fixture(scope="module", params=["thread", "end", "node"])
def way(request):
    """Parametrize over the methods of sending gradients, and parameters stored once per node."""
    return request.param


@pytest.fixture(scope="module")
def hvd(way):
    """Initialize a world for all cases of one method; the next case can run after an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_OVERLAP", "inline" if way == "node" else way)
        patch.setenv("HPCTRAIN_BUCKET_BYTES", "64 B")
        hpctrain.init(ranks_per_node=2)
        yield hpctrain
        hpctrain.shutdown()


OWN = (
    *("clamp_of_data", "product", "product_of_some", "change_in_place", "clip_by_norm"),
    *("clip_by_value", "transposed_square", "swapped_parameters"),
)
"""Changes of ``.grad`` that are refused where it is each rank's own gradient."""
REFUSED_ON_NODES = REFUSED | {f"{name}_between_backward_and_step" for name in OWN}
REFUSED_ON_NODES |= {
    "change_in_place_between_two_backwards",
    "clamp_of_data_without_forgetting",
    "product_then_two_steps",
    "own_gradients_after_a_backward",
    "own_gradient_of_one_after_a_backward",
    "an_average_that_is_replaced_between_two_losses",
    "some_synchronized_clipped_and_skipped",
    "only_what_was_frozen_gets_a_gradient",  # the gradient is clipped
    "swapped_by_a_conversion",
    "several_closures_of_one_step",  # LBFGS
    "single_precision_between_backward_and_step",
    "single_precision_and_back_between_backward_and_step",
    "synchronized_and_clipped_after_one_of_two_passes",
}
OTHER_ON_NODES = {
    ("gradient_of_a_frozen_parameter", "Sum"),
    ("surgery_on_gradients_of_two_losses", "Average"),  # the surgery clamps gradients
    ("surgery_on_gradients_of_two_losses", "Sum"),
}
"""Cases that set gradients to local values, which are then averaged or summed."""


def error_of(script: Callable[[], None], world) -> HpctrainError | None:
    """Run a script; return its error, and assert that all ranks raise the same kind of error."""
    error: HpctrainError | None = None
    try:
        script()
    except HpctrainError as caught:
        error = caught
    kinds = world.allgather(type(error).__name__)
    assert len(set(kinds)) == 1, f"{kinds}: {error}"
    return error


def wrap_of(hvd, way, op):
    """Return the function that wraps a side's optimizer."""
    options = {"op": getattr(hvd, op), "shard": "node" if way == "node" else None}
    return partial(hvd.DistributedOptimizer, **options)


@SIZES
@pytest.mark.parametrize(("name", "op"), [(name, op) for name in CASES for op in CAN[name]])
def test_change_gives_the_average_on_every_rank(hvd, way, world, name, op):
    if way == "node" and (name, op) in OTHER_ON_NODES:
        return
    refused = REFUSED_ON_NODES if way == "node" else REFUSED
    side = Side(hvd.rank(), hvd.size(), wrap_of(hvd, way, op), 1)
    alone = Side(0, 0, lambda o: o, hvd.size() if op == "Sum" else 1)
    alone.begin()
    weights: list[Tensor] = []

    def script():
        side.begin()
        CASES[name](side)
        weights.extend(finish(side))

    error = error_of(script, world)
    assert (error is not None) == (name in refused), error
    if error is not None:
        return
    CASES[name](alone)
    expected = finish(alone)
    for mine, wanted in zip(weights, expected, strict=True):
        tolerance = 1e-5 if "single" in name or "swapped_by" in name or "double" in name else 1e-9
        torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(weights[0], other) for other in world.allgather(weights[0]))


# Calls on some ranks only


@torch.no_grad()
def edit_a_weight(side):
    side.net.body.weight[0] += 1


def set_head(side, made):
    side.net.head.weight.grad = made(side.net.head.weight)


def load_other_state(side):
    state = side.optimizer.state_dict()
    state["state"] = {
        number: {"momentum_buffer": values["momentum_buffer"] + 1}
        for number, values in state["state"].items()
    }
    side.optimizer.load_state_dict(state)


def nothing(side):
    assert side.size > 1


PARTINGS: dict[str, tuple[Callable[[Side], object], Callable[[Side], object]]] = {
    # name: calls of rank 0 before a backward, and after it
    "drops_one": (nothing, lambda side: set_head(side, lambda _: None)),
    "replaces_one": (nothing, lambda side: set_head(side, torch.ones_like)),
    "changes_one_in_place": (nothing, lambda side: side.net.head.weight.grad.mul_(2)),
    "runs_backward_once_more": (nothing, lambda side: side.backward(1)),
    "leaves_a_step_out": (nothing, nothing),
    "steps_without_a_backward": (lambda side: side.optimizer.step(), nothing),
    "edits_a_weight": (edit_a_weight, nothing),
    "has_another_learning_rate": (
        lambda side: side.optimizer.param_groups[0].update(lr=0.2),
        nothing,
    ),
    "freezes": (lambda side: side.net.head.requires_grad_(False), nothing),
    "converts": (lambda side: side.net.float(), nothing),
    "loads_other_state": (load_other_state, nothing),
}


def part(side: Side, name: str) -> None:
    before, after = PARTINGS[name]
    if side.rank == 0:
        before(side)
    if side.rank or name != "steps_without_a_backward":
        side.backward()
        if side.rank == 0:
            after(side)
        if side.rank or name != "leaves_a_step_out":
            side.optimizer.step()


def replace_by_its_rank(side: Side) -> None:
    side.backward()
    set_head(side, lambda weight: torch.full_like(weight, float(side.rank)))
    side.optimizer.step()


def forget_and_let_rank_0_go_on(side: Side) -> None:
    """Skip a step, as for a NaN, and the next backward on ranks other than 0."""
    side.backward()
    side.net.zero_grad()
    if side.rank == 0:
        side.backward()
    side.optimizer.step()


SCRIPTS = {name: partial(part, name=name) for name in PARTINGS}
SCRIPTS |= {one.__name__: one for one in (replace_by_its_rank, forget_and_let_rank_0_go_on)}


@SIZES
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_calls_of_some_ranks_raise_on_all_or_have_no_effect(hvd, way, world, name, op):
    side = Side(hvd.rank(), hvd.size(), wrap_of(hvd, way, op), 1)

    def script():
        side.begin()
        SCRIPTS[name](side)
        for batch in range(3):
            side.step(batch)

    if error_of(script, world) is None:
        weights = world.allgather([p.detach().clone() for p in side.net.parameters()])
        for others in weights:
            assert all(map(torch.equal, weights[0], others))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_raises_with_local_losses_and_accepts_their_mean(world, hvd, line_search):
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(world.rank)).double()
    for of_all in (True, False):
        net = torch.nn.Linear(5, 1).double()
        plain = torch.optim.LBFGS(net.parameters(), max_iter=8, line_search_fn=line_search)
        optimizer = hvd.DistributedOptimizer(plain, net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)

        def closure(net=net, optimizer=optimizer, of_all=of_all):
            optimizer.zero_grad()
            loss = (net(x) - x.square().sum(1, keepdim=True)).square().mean()
            loss.backward()
            return hvd.allreduce(loss.detach()) if of_all else loss

        if of_all:
            optimizer.step(closure)
            assert len({p.numpy().tobytes() for p in world.allgather(net.weight.detach())}) == 1
        else:
            with pytest.raises(MismatchError, match=r"LBFGS closure .*hvd\.allreduce\(loss"):
                optimizer.step(closure)
