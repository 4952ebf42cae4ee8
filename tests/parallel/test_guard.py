"""An action of one rank of a divided model is an error on all ranks, in the same step.

An action of all ranks trains as one process that does the same.
"""

import copy
import os
import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from hpctrain import ConfigError, HpctrainError, MismatchError
from hpctrain.parallel import Pipeline, build_mesh, hybrid_mesh, shard, tensor_parallel
from hpctrain.parallel.dtensor import whole
from tests.parallel.training import loss_of

pytestmark = pytest.mark.usefixtures("nodes")

WORDS, WIDTH, STEPS = 24, 8, 4
ROLES = {"0": "vocabulary", "*.up": "column", "*.down": "row", "3": "vocabulary"}
SEEDS = range(int(os.environ.get("TEST_ALONE", "8")))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def made(*, tied):
    torch.manual_seed(0)
    ends = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    model = nn.Sequential(ends[0], Layer(), Layer(), ends[1]).double()
    if tied:
        model[3].weight = model[0].weight
    return model


class Program:
    """A training of a few steps, divided or not, with an optional action in each step."""

    def __init__(self, layout):
        self.layout = layout
        self.pipeline = None
        self.model = made(tied="pp" in layout and "untied" not in layout)
        self.replicated = "0.weight" if "pp" in layout else "1.norm.weight"
        size = dist.get_world_size()
        if "tp" in layout:
            mesh = build_mesh(tp=2, pp=2 if "pp" in layout else 1)
            tensor_parallel(self.model, mesh["tp"], ROLES, sequence="sequence" in layout)
        elif "pp" in layout:
            mesh = build_mesh(pp=2)
        if "fsdp" in layout and "pp" not in layout:
            fully_shard(self.model[1], mesh=mesh["dp"])
            fully_shard(self.model, mesh=mesh["dp"])
        if "pp" in layout:
            wraps = {"fsdp": self._fsdp, "ddp": self._ddp}
            self.axis = mesh["dp"]
            chosen = {name: wrap for name, wrap in wraps.items() if name in layout}
            self.pipeline = Pipeline(
                self.model,
                mesh["pp"],
                ["*"],
                loss=loss_of,
                num_microbatches=2,
                wrap=next(iter(chosen.values()), None),
            )
            self.model = self.pipeline.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if "zero" in layout:
            mesh = hybrid_mesh() if "replicas" in layout else build_mesh(dp=size)["dp"]
            stage = int(layout.partition("zero")[2][0])
            self.optimizer = shard(self.model, self.optimizer, stage=stage, mesh=mesh)

    def _fsdp(self, stage):
        return fully_shard(stage, mesh=self.axis)

    def _ddp(self, stage):
        return DistributedDataParallel(stage, process_group=self.axis.get_group())

    def parameter(self):
        """Return the parameter that actions change; ranks have replicas or parts of it."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return named.get(self.replicated, named.get("3.weight"))

    def backward(self, given, target):
        if self.pipeline is not None:
            with loss_parallel() if "tp" in self.layout else nullcontext():
                self.pipeline.step(given, target)
            return
        with loss_parallel() if "tp" in self.layout else nullcontext():
            loss_of(self.model(given), target).backward()

    def step(self, given, target, action):
        """Take one step with an action; "" means none."""
        if action == "freeze":
            self.parameter().requires_grad_(False)
        if action != "keep gradients":
            self.optimizer.zero_grad()
        self.backward(given, target)
        if action in CHANGES:
            CHANGES[action](self)
        for _ in range({"leave a step out": 0, "step twice": 2}.get(action, 1)):
            self.optimizer.step()


def another_rate(program):
    program.optimizer.param_groups[0]["lr"] = 0.05


@torch.no_grad()
def write(program):
    program.parameter().mul_(0.5)


def drop_a_gradient(program):
    program.parameter().grad = None


def scale_gradients(program):
    for parameter in program.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


CHANGES = {
    "another rate": another_rate,
    "clip values": lambda program: nn.utils.clip_grad_value_(program.model.parameters(), 1e-4),
    "write": write,
    "drop a gradient": drop_a_gradient,
    "scale gradients": scale_gradients,
    "clear gradients": lambda program: program.optimizer.zero_grad(),
}
ACTIONS = ("freeze", "keep gradients", "leave a step out", "step twice", *CHANGES)


class Whole(Program):
    """The same training in one process."""

    def __init__(self, layout):
        self.layout, self.pipeline = "", None
        self.model = made(tied="pp" in layout)
        self.replicated = "0.weight" if "pp" in layout else "1.norm.weight"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


OF_STAGES = (
    *("keep gradients", "leave a step out", "step twice", "another rate"),
    *("clip values", "scale gradients", "clear gradients"),
)
OF_TWO = ("tp", "tp sequence", "zero1", "zero2", "zero3", "pp")
OF_FOUR = ("tp fsdp", "zero3 replicas", "pp tp", "pp fsdp", "pp ddp")


def batches(seed=1):
    random_numbers = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        windows = torch.randint(WORDS, (4, 9), generator=random_numbers)
        yield windows[:, :-1], windows[:, 1:]


def trained(program, action, *, at=2, is_actor=True):
    for number, batch in enumerate(batches()):
        program.step(*batch, action if is_actor and number == at else "")
    return program


def require_an_error(layout, action, who, at=2):
    program = Program(layout)
    kind, match = MismatchError, rf"^ranks .*must .* differ in .*rank.*{who}"
    if action == "freeze" and layout == "pp":
        kind, match = (
            ConfigError,
            "a shared weight must be trained in all of its stages or in none",
        )
    with pytest.raises(kind, match=match) as output:
        trained(program, action, at=at, is_actor=dist.get_rank() == who)
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(output.value))
    assert len({*texts}) == 1, texts


def require_the_same_as_one_process(layout, action):
    program, alone = trained(Program(layout), action), trained(Whole(layout), action)
    for name, parameter in program.model.named_parameters(remove_duplicate=False):
        expected = dict(alone.model.named_parameters(remove_duplicate=False))[name].detach()
        found = whole(parameter.detach())
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("layout", OF_TWO)
def test_an_action_of_one_of_two_ranks_is_an_error_on_all(layout, action):
    require_an_error(layout, action, who=1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("action", OF_STAGES)
def test_an_action_of_one_stage_on_all_its_layers_is_an_error_on_all(action):
    require_an_error("pp untied", action, who=1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("layout", OF_FOUR)
def test_an_action_of_one_of_four_ranks_is_an_error_on_all(layout, action):
    require_an_error(layout, action, who=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("action", ["", *ACTIONS])
@pytest.mark.parametrize("layout", OF_TWO)
def test_an_action_of_all_ranks_trains_as_in_one_process(layout, action):
    require_the_same_as_one_process(layout, action)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["tp", "zero1", "zero2", "zero3"])
def test_clipping_values_that_changes_only_one_rank_trains_as_in_one_process(layout):
    programs = Program(layout), Whole(layout)
    is_changed = []
    for batch in batches():
        for program in programs:
            program.optimizer.zero_grad()
            program.backward(*batch)
            gradients = [p.grad for p in program.model.parameters() if p.grad is not None]
            parts = [getattr(one, "_local_tensor", one) for one in gradients]
            before = [part.clone() for part in parts]
            nn.utils.clip_grad_value_(program.model.parameters(), 0.03)
            is_changed.append([not torch.equal(*two) for two in zip(before, parts, strict=True)])
            program.optimizer.step()
    for name, parameter in programs[0].model.named_parameters():
        expected = dict(programs[1].model.named_parameters())[name].detach()
        torch.testing.assert_close(whole(parameter.detach()), expected, rtol=1e-12, atol=1e-12)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, is_changed)
    assert of_ranks[0] != of_ranks[1]  # otherwise the test proves nothing


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_actions_of_one_rank_are_an_error_on_all_or_leave_replicas_equal(seed):
    drawn, size = random.Random(seed), dist.get_world_size()
    layout = drawn.choice(OF_TWO if size == 2 else OF_FOUR)
    who, number = drawn.randrange(size), drawn.randint(0, 2)
    actions = {drawn.randrange(STEPS): drawn.choice(ACTIONS) for _ in range(number)}
    program, error = Program(layout), None
    try:
        for step, batch in enumerate(batches(seed)):
            program.step(*batch, actions.get(step, "") if dist.get_rank() == who else "")
        program.step(*batch, "")  # one more step, so that an action in the last step is compared
    except HpctrainError as raised:
        error = str(raised)
    errors = [None] * size
    dist.all_gather_object(errors, error)
    assert len({*errors}) == 1, (layout, who, actions, errors)
    if error is None:
        # there are no gradients to keep in step 0
        assert actions in ({}, {0: "keep gradients"}), (layout, who, actions)
        found = [None] * size
        dist.all_gather_object(found, values(program))
        for other in found:
            assert all(other.get(name, value) == value for name, value in found[0].items())


def values(program):
    """Return a value of each parameter of this rank, to compare replicas."""
    named = program.model.named_parameters(remove_duplicate=False)
    found = {name: whole(p.detach()).square().sum().item() for name, p in named}
    if "0.weight" in found:
        found["3.weight"] = found["0.weight"]  # in a pipeline, 0.weight and 3.weight are tied
    return found if program.pipeline else {n: v for n, v in found.items() if n != "3.weight"}


@pytest.mark.ranks(2)
def test_stages_may_have_different_settings_optimizers_and_frozen_layers():
    rank, (batch, *_) = dist.get_rank(), batches()
    program = Program("pp untied")
    program.optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)  # different from the first step on
    named = dict(program.model.named_parameters())
    first = named.pop("1.norm.weight", None)
    if first is not None:
        program.optimizer.param_groups[0]["params"] = [*named.values()]
        alone = torch.optim.SGD([first], lr=0.5)
    for _ in range(2):
        program.step(*batch, "")
        program.optimizer.param_groups[0]["lr"] /= 1 + rank
        if first is not None:
            alone.step()
    with pytest.raises(MismatchError, match="clear and clip gradients together, but"):
        program.step(*batch, "clip values" if rank else "")

    program = Program("pp untied")
    for name, parameter in program.model.named_parameters():
        parameter.requires_grad_(name.startswith("2."))  # the first stage trains nothing
    for _ in range(2):
        program.optimizer.zero_grad()
        program.backward(*batch)
        if rank:
            program.optimizer.step()


@pytest.mark.ranks(2)
def test_a_copy_of_a_model_is_not_compared():
    program = Program("tp")
    averaged = copy.deepcopy(program.model)
    (batch, *_) = batches()
    if dist.get_rank():
        averaged[1].norm.weight.requires_grad_(False)
    with loss_parallel():
        loss_of(averaged(batch[0]), batch[1]).backward()
    program.step(*batch, "")
