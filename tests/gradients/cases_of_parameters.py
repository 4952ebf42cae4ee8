"""Register cases that change parameters, wraps and passes."""

import copy

import torch
from torch import nn

from tests.gradients.cases import (
    between_backward_and_step,
    between_two_passes,
    case,
    enter_changes,
    with_passes,
)

# Changes of parameters


def freeze_body(net):
    net.body.requires_grad_(False)


enter_changes(
    between_backward_and_step,
    {
        "frozen": freeze_body,
        "single_precision": lambda net: net.float(),
        "single_precision_and_back": lambda net: net.float().double(),
    },
)
enter_changes(between_two_passes, {"frozen": freeze_body})


@case()
def frozen_between_steps(side):
    side.step()
    freeze_body(side.net)
    side.step(1)
    side.net.body.requires_grad_()
    side.step(2)


@case()
def frozen_with_a_gradient_that_stays(side):
    side.backward()
    freeze_body(side.net)
    side.optimizer.step()
    for p in (*side.net.head.parameters(), *side.net.other.parameters()):
        p.grad = None
    side.backward(1)
    side.optimizer.step()


@case()
def unfrozen_between_backward_and_step(side):
    freeze_body(side.net)
    between_backward_and_step(side, lambda net: net.body.requires_grad_())


@case()
def only_what_was_frozen_gets_a_gradient(side):
    side.net.head.requires_grad_(False)
    side.step()
    side.net.head.requires_grad_()
    side.optimizer.zero_grad()
    freeze_body(side.net)
    side.net.other.requires_grad_(False)
    side.backward(1)
    nn.utils.clip_grad_norm_(side.net.parameters(), 0.01)
    side.optimizer.step()


@case()
def gradient_of_a_frozen_parameter(side):
    freeze_body(side.net)
    side.step()
    side.backward(1)
    side.net.body.weight.grad = torch.full_like(side.net.body.weight, 0.5)
    side.optimizer.step()


def late_parameter(side):
    side.net.late = late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    return late


def backward_with(side, late, batch=0):
    side.optimizer.zero_grad()
    side.loss(batch, lambda x: side.net(x) * late).backward()


@case()
def group_added(side):
    late = late_parameter(side)
    side.step()
    side.optimizer.add_param_group({"params": [late]})
    for batch in (1, 2):
        backward_with(side, late, batch)
        side.optimizer.step()


@case("Average")
def group_with_gradients_added_before_a_step(side):
    late = late_parameter(side)
    backward_with(side, late)
    side.optimizer.add_param_group({"params": [late]})
    side.optimizer.step()
    side.step(1)


@case()
def group_added_between_backward_and_step(side):
    late = late_parameter(side)
    backward_with(side, late)
    if not side.is_alone:  # the gradient was not averaged, and step() would average it
        late.grad = None
    side.optimizer.step()
    side.optimizer.add_param_group({"params": [late]})
    late.grad = None
    side.step(1)


@case()
def state_loaded_before_a_step(side):
    side.step()
    side.backward(1)
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    side.optimizer.step()


@case("Average")
def double_while_gradients_exist(side):
    side.net.float()
    side.backward()
    side.optimizer.zero_grad(set_to_none=False)
    side.net.double()
    for batch in (1, 2):
        side.backward(batch)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)


@case()
def shared_memory(side):
    side.backward()
    side.net.share_memory()
    side.optimizer.step()
    for batch in (1, 2):
        side.optimizer.zero_grad(set_to_none=False)
        side.backward(batch)
        side.optimizer.step()


@case()
def swapped_by_a_conversion(side):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        side.backward()
        side.net.float().double()
        side.optimizer.step()
        for batch in (1, 2):
            side.optimizer.zero_grad()
            side.backward(batch)
            nn.utils.clip_grad_norm_(side.net.parameters(), 0.01)
            side.optimizer.step()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@case()
def loaded_by_assignment(side):
    side.step()
    side.net.load_state_dict({n: t.clone() for n, t in side.net.state_dict().items()}, assign=True)
    side.make()
    side.step(1)


@case()
def data_replaced(side):
    side.step()
    side.net.head.weight.data = side.net.head.weight.data.clone() * 0.5
    side.step(1)


@case()
def edited_without_autograd(side):
    side.step()
    with torch.no_grad():
        side.net.head.weight.mul_(0.5)
    side.step(1)


@case()
def tied(side):
    side.net.other = side.net.head
    side.make()
    for batch in range(3):
        side.step(batch)


# Wraps


@case()
def wrapped_anew(side):
    side.step()
    side.make(lr=0.05)
    side.step(1)


@case()
def wrapped_anew_while_the_old_one_lives(side):
    old = side.optimizer
    side.make()
    for batch in range(3):
        side.step(batch)
    assert old is not side.optimizer


# Passes


@case()
def step_after_one_of_two_passes(side):
    with_passes(side, 2)
    for batch in range(3):
        side.step(batch)


@case()
def synchronized_and_clipped_after_one_of_two_passes(side):
    with_passes(side, 2)
    side.optimizer.zero_grad()
    side.backward()
    if not side.is_alone:
        side.optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(side.net.parameters(), 0.01)
    side.optimizer.step()


@case()
def passes_change_between_steps(side):
    for passes in (2, 1, 3):
        with_passes(side, passes)
        side.optimizer.zero_grad()
        for batch in range(passes):
            side.backward(batch)
        side.optimizer.step()
