"""Check that the ranks compare replicas at shutdown, and that either all ranks raise or none."""

import gc
from contextlib import contextmanager

import pytest
import torch

import hpctrain
from hpctrain.core.errors import MismatchError, ReplicaError
from tests.gradients.training import distributed, make_model
from tests.runtime.victims import run_ranks

MANY = pytest.mark.ranks(2, 3)


class Training:
    """Train identically on all ranks of a separate world."""

    def __init__(self, **options):
        self.model = make_model()
        self.optimizer = distributed(hpctrain, self.model, **options)

    def backward(self):
        self.optimizer.zero_grad()
        x = torch.full((2, 64), 0.1 * (1 + hpctrain.rank())).double()
        self.model(x).square().sum().backward()

    def step(self, num_steps=1):
        for _ in range(num_steps):
            self.backward()
            self.optimizer.step()


@contextmanager
def world_of_its_own(**options):
    hpctrain.init(**options)
    try:
        yield
    except BaseException:
        hpctrain.shutdown()
        raise


@contextmanager
def two_steps(op="Average"):
    """Yield a training that has taken two steps in a separate world."""
    with world_of_its_own():
        training = Training(op=getattr(hpctrain, op))
        training.step(2)
        yield training


@contextmanager
def at_the_end(function):
    try:
        yield
    finally:
        function()


def end(world):
    """Shut the world down; return the message raised on every rank, or ''. Collective."""
    message = ""
    try:
        hpctrain.shutdown()
    except ReplicaError as error:
        message = str(error)
    assert not hpctrain.is_initialized()
    every = world.allgather(message)
    assert len(set(every)) == 1
    return message


def edits_a_weight_between_backward_and_step(training):
    training.backward()
    with torch.no_grad():
        training.model[2].bias[0] += 1e-9
    training.optimizer.step()


def takes_another_rate(training):
    training.optimizer.param_groups[0]["lr"] *= 2
    training.step()


def edits_a_weight_behind_it(training):
    training.step()
    training.model[2].bias.data[0] += 1e-9


CHANGES = [
    *(
        (change, op)
        for change in (
            edits_a_weight_between_backward_and_step,
            takes_another_rate,
            edits_a_weight_behind_it,
        )
        for op in ("Average", "Sum")
    ),
    (
        edits_a_weight_behind_it,
        "Adasum",
    ),  # compares in step()
]


@MANY
@pytest.mark.parametrize(("change", "op"), CHANGES)
def test_weight_changed_by_one_rank_in_the_last_step_is_reported_at_shutdown(world, change, op):
    with two_steps(op) as training:
        (change if world.rank == 1 else Training.step)(training)
    message = end(world)
    others = "rank 0" if world.size == 2 else "ranks 0,2"
    assert message.startswith("all ranks must be equal after the last step, but differ: ")
    assert "2.bias" in message or change is takes_another_rate
    assert f"{others}: " in message
    assert "; rank 1: " in message


def leaves_out_the_step(training):
    training.backward()


@MANY
@pytest.mark.parametrize(
    ("change", "op", "output"),
    [
        (leaves_out_the_step, "Average", "the number of steps"),
        (leaves_out_the_step, "Sum", "the number of steps"),
        (edits_a_weight_behind_it, "Average", "2.bias"),
    ],
)
def test_divergence_is_reported_after_optimizer_and_model_are_deleted(world, change, op, output):
    def train():
        training = Training(op=getattr(hpctrain, op))
        training.step(2)
        (change if world.rank == 1 else Training.step)(training)

    with world_of_its_own():
        train()
        gc.collect()
    assert output in end(world)


@MANY
def test_time_of_garbage_collection_does_not_change_the_comparison(world):
    with two_steps() as training:
        training.optimizer.itself = training.optimizer
        del training.optimizer
        if world.rank == 1:
            gc.collect()
        training.model[0].weight.data.mul_(0.5)
        gc.collect()
    assert not end(world)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shared", [False, True], ids=["process set", "once a node"])
def test_ranks_of_a_process_set_and_nodes_compare_as_well(world, shared):
    with world_of_its_own(ranks_per_node=2):
        few = hpctrain.add_process_set([0, 1])
        training = Training(**{"shard": "node"} if shared else {"process_set": few})
        training.step(2)
        if world.rank == 1:
            training.model[2].bias.data[0] += 1e-9
    message = end(world)
    assert "2.bias" in message
    assert "rank 1: " in message


def all_change_alike(training):
    training.model[0].weight.data.mul_(0.5)


def one_tests_with_averaged_weights(training):
    if hpctrain.rank() == 0:
        with torch.no_grad():
            training.model[0].weight.mul_(0.5)


def one_exports_in_half_precision(training):
    if hpctrain.rank() == 0:
        training.model.half()


def each_trains_a_head_of_its_own(training):
    head = training.model[4]
    alone = torch.optim.SGD(head.parameters(), lr=0.1 * (1 + hpctrain.rank()))
    training.model.zero_grad()
    head(torch.ones(2, 32).double()).sum().backward()
    alone.step()


def one_loads_a_state(training):
    if hpctrain.rank() == 0:
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.model.load_state_dict(make_model().state_dict())


def one_drops_its_optimizer(training):
    if hpctrain.rank() == 0:
        del training.optimizer
        gc.collect()


def some_join(training):
    training.step(hpctrain.rank())
    hpctrain.join()


def all_part_and_are_told(training):
    training.model[0].weight.data += hpctrain.rank()
    with pytest.raises(MismatchError):
        training.step()


def all_have_no_gradients(training):
    for _ in range(2):
        training.optimizer.zero_grad(set_to_none=False)
        training.optimizer.step()


def all_freeze_a_layer(training):
    training.model[0].requires_grad_(False)
    training.step()


def sets_differ(training):
    sets = [hpctrain.add_process_set([rank]) for rank in range(hpctrain.size())]
    pair = hpctrain.add_process_set([0, 1]) if hpctrain.size() > 2 else None
    other = [
        torch.optim.SGD(training.model.parameters(), lr=0.1 * (1 + hpctrain.rank())),
        torch.optim.SGD(make_model().parameters(), lr=0.1),
    ]
    alone = hpctrain.DistributedOptimizer(other[0], process_set=sets[hpctrain.rank()])
    if pair is not None:
        hpctrain.DistributedOptimizer(other[1], process_set=pair).step()
    training.backward()
    alone.step()


def all_take_several_optimizers(_):
    more = [Training(op=op) for op in (hpctrain.Sum, hpctrain.Adasum)]
    for one in more:
        one.step()


HEALTHY = (
    all_change_alike,
    one_tests_with_averaged_weights,
    one_exports_in_half_precision,
    each_trains_a_head_of_its_own,
    one_loads_a_state,
    one_drops_its_optimizer,
    some_join,
    all_part_and_are_told,
    all_have_no_gradients,
    all_freeze_a_layer,
    sets_differ,
    all_take_several_optimizers,
)


@MANY
@pytest.mark.parametrize("does", HEALTHY)
def test_equal_or_intended_changes_are_not_reported(world, does):
    with two_steps() as training:
        does(training)
    assert not end(world)


@MANY
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_scaler_that_skips_on_one_or_all_ranks_is_not_reported(world, op):
    with world_of_its_own():
        training = Training(op=getattr(hpctrain, op))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for flawed in ((), (1,), range(world.size), ()):
            training.optimizer.zero_grad()
            x = torch.full((2, 64), torch.inf if world.rank in flawed else 0.1).double()
            scaler.scale(training.model(x).square().sum()).backward()
            scaler.step(training.optimizer)
            scaler.update()
    assert not end(world)


@MANY
@pytest.mark.parametrize("setting", ["warn", "off"])
def test_comparison_at_shutdown_can_warn_only_or_be_disabled(world, setting, monkeypatch, caplog):
    monkeypatch.setenv("HPCTRAIN_CHECK_WEIGHTS", setting)
    with two_steps() as training:
        training.model[2].bias.data[0] += world.rank
    assert not end(world)
    output = [r for r in caplog.records if "equal after the last step" in r.getMessage()]
    assert len(output) == (setting == "warn" and world.rank == 0)


@MANY
def test_pending_exception_of_one_rank_takes_precedence(world):
    with two_steps() as training:
        training.model[2].bias.data[0] += world.rank
    if world.rank == 1:
        with pytest.raises(ValueError, match="bad luck"), at_the_end(hpctrain.shutdown):
            raise ValueError("bad luck")
    else:
        hpctrain.shutdown()


@MANY
def test_weights_that_never_were_equal_are_not_reported_again(world):
    with world_of_its_own():
        training = Training()
        with torch.no_grad():
            training.model[0].weight.add_(world.rank)
        training.step()
    assert not end(world)


BODY = """
def main(op, *, may_part):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * (1 + rank)).square().sum().backward()
        if may_part and step == 2 and rank == 1:
            {does}
        optimizer.step()
        if may_part and step == 2 and rank == 1:
            {then}
    print("the last line of rank", rank)

main(hvd.Average, may_part=False)
hvd.shutdown()
hvd.init()
now()
main(hvd.{op}, may_part=True)
"""
EDIT = "model.bias.data[0] += 1"
PARTED = "ReplicaError: all ranks must be equal after the last step, but differ: bias (rank 0: "
ENDS = {
    "nothing": ("pass", "pass", "Average", 0, ""),
    "a weight": ("pass", EDIT, "Adasum", 1, PARTED),
    "a weight, and an exit code": ("pass", EDIT + "; sys.exit(3)", "Sum", 1, PARTED),
    "a gradient": ("model.bias.grad.mul_(2)", "pass", "Average", 87, "rank 0 left the program"),
    "a step": ("return", "pass", "Adasum", 87, "rank 1 left the program"),
}


@pytest.mark.launches
@pytest.mark.limit(150)
@pytest.mark.parametrize("what", ENDS)
def test_exit_code_of_a_script_reflects_the_comparison(tmp_path, what):
    does, then, op, code, message = ENDS[what]
    outcome = run_ranks(tmp_path, BODY.format(does=does, then=then, op=op))
    assert outcome.code == code, outcome.err
    assert message in outcome.err
    assert not outcome.left_over
    assert outcome.seconds < 10
    if what in ("nothing", "a weight"):
        assert outcome.out.count("the last line of rank") == 4
    if not code:
        assert not outcome.err
