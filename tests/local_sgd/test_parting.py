"""Ranks that diverge inside a local method get an error on every rank within seconds."""

import time

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpctrain.core.errors import CommError, ConfigError
from tests.gradients.conftest import in_world
from tests.gradients.training import global_batch, part_of
from tests.harness.pace import scaled
from tests.local_sgd.local_methods import Run

FEW = pytest.mark.ranks(2, 3)
LONG = pytest.mark.conformance
SOON_S = 20.0
MORE = ((4, 5), (8, 4))

SYNCHRONOUS = {
    "PostLocalSGD": {"start": 100},
    "HierarchicalLocalSGD": {"steps": 100},
    "StagedSGD": {"warmup_steps": 100, "cooldown_start": 200},
}
"""Methods whose first steps average the gradients of a node in every step."""


@pytest.fixture(params=(None, 1), ids=("one node", "nodes of one"))
def hvd_anywhere(request, worlds):
    """A world of one node, or of one rank per node."""
    yield from in_world(request, worlds, request.param)


@pytest.fixture(params=(None, 2), ids=("one node", "nodes of two"))
def hvd_by_node(request, worlds):
    """A world of one node, or of two ranks per node."""
    yield from in_world(request, worlds, request.param)


def train_and_change_gradients(hvd, run: Run, steps: dict[int, int]) -> None:
    """Train ten steps; ``steps`` gives the step in which a rank replaces its gradients."""
    with run.method:
        for step in range(10):
            images, labels = part_of(global_batch(step), hvd.rank(), hvd.size())
            run.optimizer.zero_grad()
            cross_entropy(run.model(images), labels).backward()
            for p in run.model.parameters() if steps.get(hvd.rank()) == step else ():
                p.grad = p.grad * 0.5
            run.optimizer.step()


@FEW
@pytest.mark.usefixtures("last")
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_gradients_changed_in_different_steps_are_an_error(hvd, name):
    run = Run(hvd, name, **SYNCHRONOUS[name])
    with pytest.raises(CommError, match=r"same steps|has left"):
        train_and_change_gradients(hvd, run, {0: 5, 1: 3})


STAGES = {"warmup_steps": 3, "cooldown_start": 9, "steps": 3}


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("last")
@pytest.mark.parametrize(
    ("name", "options", "step"),
    [  # a step before a synchronization of all ranks, at the end of a phase, or the last one
        ("HierarchicalLocalSGD", {"steps": 3}, 2),
        ("HierarchicalLocalSGD", {"steps": 3}, 9),
        ("PostLocalSGD", {"start": 3}, 2),
        ("StagedSGD", STAGES, 2),
        ("StagedSGD", STAGES, 9),
    ],
)
def test_gradients_changed_on_one_rank_before_a_synchronization_are_an_error(
    hvd_by_node, name, options, step
):
    run = Run(hvd_by_node, name, **options)
    with pytest.raises(CommError, match=r"take the same steps|left the program|has left"):
        train_and_change_gradients(hvd_by_node, run, {1: step})


@FEW
@pytest.mark.usefixtures("last")
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_replicas_that_diverge_in_synchronous_steps_are_an_error_at_the_next_step(hvd, name):
    run = Run(hvd, name, **SYNCHRONOUS[name]).to(3)
    if hvd.rank() == 1:
        run.optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(CommError, match=r"replicas must be equal|has left"):
        run.end(10)


@pytest.mark.ranks(3, 4)
def test_ranks_of_a_node_that_skip_steps_alone_stay_identical(world, hvd_nodes):
    run = Run(hvd_nodes, "HierarchicalLocalSGD", 6)
    for rank in (1, 0):
        run.to(run.at + 2)
        if hvd_nodes.rank() == rank:
            run.skip()
        else:
            run.to(run.at + 1)
    run.end(20)
    assert run.num_kinds(world) == 1


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("is_reported", [True, False])
def test_samples_of_a_skipped_step_do_not_count_on_the_node(world, hvd_nodes, is_reported):
    model = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = hvd_nodes.HierarchicalLocalSGD(model, optimizer, 6)
    for step in range(2):
        is_skipped = step == 1 and world.rank == 0
        if is_reported or not is_skipped:
            method.set_num_samples(3, nominal=2)
        before = model.weight.item()
        if is_skipped:
            method.skip_step()
            continue
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        assert model.weight.item() == pytest.approx(before - 1, rel=1e-12)
    method.finish()
    method.close()


@FEW
@pytest.mark.usefixtures("last")
@pytest.mark.parametrize(
    "num_steps", [(5, 4), *(pytest.param(n, marks=LONG) for n in MORE)], ids=str
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LocalSGD", {"steps": 2}),
        ("HierarchicalLocalSGD", {"steps": 2}),
        ("HierarchicalLocalSGD", {"steps": 4, "node_steps": 2}),
        ("DiLoCo", {"steps": 2}),
        ("PostLocalSGD", {"steps": 2, "start": 1}),
    ],
    ids=["local", "hierarchical", "hierarchical in two levels", "diloco", "post local"],
)
def test_different_numbers_of_steps_in_a_block_are_an_error(
    hvd_anywhere, name, options, num_steps
):
    run = Run(hvd_anywhere, name, **options)
    start = time.monotonic()
    with pytest.raises(CommError) as caught:
        run.end(num_steps[min(hvd_anywhere.rank(), 1)])
    assert time.monotonic() - start < scaled(SOON_S)
    assert "HPCTRAIN_TIMEOUT" not in str(caught.value)


@FEW
@pytest.mark.usefixtures("last")
def test_join_inside_a_block_is_rejected(hvd_nodes):
    run = Run(hvd_nodes, "LocalSGD", 4).to(2)
    with (
        pytest.raises(ConfigError, match="must not be called in a block of a local method"),
        run.method,
    ):
        hvd_nodes.join()
