"""``PostLocalSGD``: torch's own in every step, and the switch by the learning rate."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.errors import MismatchError
from tests.gradients.training import make_model, sgd
from tests.local_sgd.local_methods import num_kinds, train, weights_of

NUM_STEPS, START, STEPS = 18, 5, 3


@pytest.fixture
def gloo(world, tmp_path):
    """Start torch's process group, on the same ranks."""
    file = world.bcast(str(tmp_path / "store"))
    store = dist.FileStore(file, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    yield
    dist.destroy_process_group()


def torchs(hvd) -> list[torch.Tensor]:
    """Return this rank's weights after each step of torch's post-local SGD."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415
    model = DistributedDataParallel(make_model())
    state = hook.PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=START,
        post_local_gradient_allreduce=False,
    )
    model.register_comm_hook(state, hook.post_localSGD_hook)
    # torch averages in the first step after the warm-up, we after a first round.
    averager = PeriodicModelAverager(period=STEPS, warmup_steps=START + STEPS - 1)
    optimizer = PostLocalSGDOptimizer(optim=sgd(model), averager=averager)
    after = []
    for step in range(NUM_STEPS):
        train(hvd, model, optimizer, None, step, step + 1)
        after.append(weights_of(model).clone())
    return after


@pytest.mark.ranks(2, 4)
@pytest.mark.conformance
@pytest.mark.usefixtures("gloo")
def test_every_step_is_torchs(world, hvd_nodes):
    expected = torchs(hvd_nodes)
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.PostLocalSGD(model, optimizer, STEPS, start=START) as method:
        for step in range(NUM_STEPS):
            train(hvd_nodes, model, optimizer, method, step, step + 1)
            torch.testing.assert_close(weights_of(model), expected[step], rtol=0, atol=1e-10)
    assert num_kinds(world, expected[-1]) == world.size


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("seen_by", ["all", "one"])
def test_it_becomes_local_when_the_learning_rate_has_dropped(world, hvd_nodes, seen_by):
    model = make_model()
    optimizer = sgd(model)
    sees = seen_by == "all" or world.rank == world.size - 1
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [6] if sees else [], gamma=0.1)
    phases = []
    with hvd_nodes.PostLocalSGD(model, optimizer, 4) as method:
        for step in range(12):
            train(hvd_nodes, model, optimizer, method, step, step + 1)
            rate.step()
            phases.append(method.facts["phase"])
    # Step 7 is the first with the lower rate; with step 8 all know of it.
    assert phases == ["synchronous"] * 7 + ["local"] * 5
    assert method.rounds.number == 1


@pytest.mark.ranks(1, 2)
def test_a_group_that_comes_later_has_a_learning_rate_that_drops(hvd_nodes):
    model = make_model()
    optimizer = sgd(model[0])
    with hvd_nodes.PostLocalSGD(model, optimizer, 4) as method:
        train(hvd_nodes, model, optimizer, method, 0, 2)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
        train(hvd_nodes, model, optimizer, method, 2, 4)
        assert method.facts["phase"] == "synchronous"
        optimizer.param_groups[1]["lr"] = 0.05
        train(hvd_nodes, model, optimizer, method, 4, 6)
        assert method.facts["phase"] == "local"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("ends", ["next", "end"])
def test_who_alone_skips_a_synchronous_step_adds_nothing_and_is_told(world, hvd_nodes, ends):
    model = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = hvd_nodes.PostLocalSGD(model, optimizer, 4, start=9)
    for step in range(2):
        if step == 1 and world.rank == 0:
            method.skip_step()
            continue
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
    assert model.weight.grad.item() == pytest.approx(1 - 1 / world.size)
    with pytest.raises(MismatchError, match=r"skip_step\(\) in a step of averaged gradients"):
        model.weight.sum().backward() if ends == "next" else method.finish()
    method.close()


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_may_skip_a_synchronous_step(world, hvd_nodes):
    model = make_model()
    optimizer = sgd(model)
    with hvd_nodes.PostLocalSGD(model, optimizer, 4, start=9) as method:
        train(hvd_nodes, model, optimizer, method, 0, 2)
        before = weights_of(model).clone()
        method.skip_step()
        assert weights_of(model).equal(before)
        train(hvd_nodes, model, optimizer, method, 3, 5)
    assert num_kinds(world, weights_of(model)) == 1
