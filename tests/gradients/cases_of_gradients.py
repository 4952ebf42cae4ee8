"""Register cases that change ``.grad`` or the order of backward and step."""

import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain
from tests.gradients.cases import (
    after_one_of_two_passes,
    between_backward_and_step,
    between_two_backwards,
    between_two_passes,
    case,
    enter_changes,
    with_passes,
)

# Changes of .grad


def set_each(net, made):
    for p in net.parameters():
        p.grad = made(p)


def clamp_data(net):
    for p in net.parameters():
        p.grad.data = p.grad.data.clamp(-0.01, 0.01)


def change_in_place(net):
    for p in net.parameters():
        p.grad.mul_(0.5).add_(0.01)


def replace(net, made):
    net.head.weight.grad = made(net.head.weight.grad)


def replace_data(net, made):
    net.head.weight.grad.data = made(net.head.weight.grad.data)


def transpose(net):
    net.body.weight.grad = net.body.weight.grad.t()


def swap(net):
    head, other = net.head.weight, net.other.weight
    head.grad, other.grad = other.grad, head.grad


def clip_norm(net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


CHANGES = {
    "clamp_of_data": clamp_data,
    "product": lambda net: set_each(net, lambda p: p.grad * 0.5),
    "product_of_some": lambda net: replace(net, lambda grad: grad * 0.5),
    "change_in_place": change_in_place,
    "clip_by_norm": clip_norm,
    "clip_by_value": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.01),
    "drop_one": lambda net: replace(net, lambda _: None),
    "drop_all": lambda net: net.zero_grad(),
    "transposed_square": transpose,
    "swapped_parameters": swap,
}
enter_changes(between_backward_and_step, CHANGES)
enter_changes(
    between_two_backwards,
    {
        "nothing": lambda _: None,
        "change_in_place": change_in_place,
        "zeros_of_the_model": lambda net: net.zero_grad(set_to_none=False),
    },
)
enter_changes(between_two_passes, {"drop_one": CHANGES["drop_one"]})
enter_changes(between_two_passes, {"swapped_parameters": swap}, "refused")
enter_changes(
    after_one_of_two_passes,
    {
        "clip_by_norm": clip_norm,
        "replaced": lambda net: replace(net, torch.sign),
        "other_data": lambda net: replace_data(net, torch.sign),
    },
    "refused",
)


@case()
def clamp_of_data_without_forgetting(side):
    side.backward()
    clamp_data(side.net)
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=False)
    side.backward(1)
    side.optimizer.step()


@case()
def product_then_two_steps(side):
    side.backward()
    CHANGES["product"](side.net)
    side.optimizer.step()
    side.optimizer.step()


@case()
def drop_one_and_go_on(side):
    side.backward()
    CHANGES["drop_one"](side.net)
    side.optimizer.step()
    side.backward(1)
    side.optimizer.step()


@case("Average")
def own_gradients_after_a_backward(side):
    for goes_on in (False, True):
        side.backward()
        side.net.zero_grad()
        set_each(side.net, lambda p: torch.full_like(p, side.x().mean().item()))
        if goes_on:
            side.backward()
        side.optimizer.step()


@case()
def surgery_on_gradients_of_two_losses(side):
    for to_none in (True, False):
        kept = []
        for batch in (0, 1):
            side.optimizer.zero_grad()
            side.backward(batch)
            kept.append([p.grad.clone() for p in side.net.parameters()])
        side.optimizer.zero_grad(set_to_none=to_none)
        for p, one, other in zip(side.net.parameters(), *kept, strict=True):
            p.grad = one + other.clamp(-0.01, 0.01)
        side.optimizer.step()


@case()
def reduced_gradients_that_are_given_back_in_part(side):
    side.backward()
    kept = side.net.head.weight.grad.clone()
    side.optimizer.zero_grad()
    side.net.head.weight.grad = kept
    side.optimizer.step()


@case()
def own_gradients_after_zero_grad(side):
    side.backward()
    side.optimizer.zero_grad()
    set_by_autograd_grad(side)
    side.optimizer.step()


@case("Average")
def own_gradient_of_one_after_a_backward(side):
    side.backward()
    replace(side.net, lambda grad: torch.full_like(grad, side.x().mean().item()))
    side.optimizer.step()


def set_by_autograd_grad(side):
    found = torch.autograd.grad(side.loss(), list(side.net.parameters()))
    for p, gradient in zip(side.net.parameters(), found, strict=True):
        p.grad = gradient


@case()
def gradients_of_autograd_grad(side):
    set_by_autograd_grad(side)
    side.optimizer.step()


@case()
def skipped_without_synchronizing(side):
    set_by_autograd_grad(side)
    if side.is_alone:
        side.optimizer.step()
        return
    with side.optimizer.skip_synchronize():
        side.optimizer.step()


@case()
def skipped_step_then_zeroed_by_the_model(side):
    side.step()
    for batch in (1, 2, 3):
        side.net.zero_grad(set_to_none=False)
        side.backward(batch)
        if batch != 2:
            side.optimizer.step()


# Order of backward and step


@case()
def step_twice(side):
    side.backward()
    side.optimizer.step()
    if not side.is_alone:
        side.optimizer.synchronize()  # the same gradients for another step
    side.optimizer.step()


@case()
def step_before_any_backward(side):
    side.optimizer.step()
    side.step()


@case()
def never_zeroed(side):
    for batch in range(4):
        side.backward(batch)
        side.optimizer.step()


@case()
def two_losses_on_disjoint_parameters(side):
    for batch in range(3):
        side.optimizer.zero_grad()
        side.loss(batch, side.net.head).backward()
        side.loss(batch, side.net.other).backward()
        side.optimizer.step()


def replaced_between_two_losses(side):
    side.head_then_other(lambda: replace(side.net, lambda grad: grad / grad.norm()))


case("Sum", "refused", name="a_sum_that_is_replaced_between_two_losses")(
    replaced_between_two_losses
)
case("Average", name="an_average_that_is_replaced_between_two_losses")(replaced_between_two_losses)


@case("Sum", "refused")
def a_sum_that_is_zeroed_on_one_rank_between_two_losses(side):
    side.head_then_other(
        lambda: replace(side.net, lambda grad: torch.full_like(grad, 0.1 * side.rank))
    )


@case("Sum")
def a_sum_that_is_converted_and_zeroed_between_two_losses(side):
    def change():
        side.optimizer.step()
        side.net.float()
        side.net.double()
        side.optimizer.zero_grad(set_to_none=False)

    side.head_then_other(change)


@case()
def two_losses_on_shared_parameters(side):
    for batch in range(3):
        side.optimizer.zero_grad()
        y = torch.tanh(side.net.body(side.x(batch)))
        scale = side.factor if side.is_alone else 1
        (side.net.head(y).square().mean() * scale).backward(retain_graph=True)
        (side.net.other(y).square().mean() * scale).backward()
        side.optimizer.step()


@case()
def one_head_after_the_other(side):
    for batch in range(4):
        head = side.net.head if batch % 2 else side.net.other
        side.optimizer.zero_grad()
        side.loss(batch, lambda x, head=head: head(torch.tanh(side.net.body(x)))).backward()
        side.optimizer.step()


@case()
def reentrant_and_plain_steps(side):
    net = side.net

    def in_part(x):
        y = torch.tanh(net.body(x))
        return checkpoint(net.head, y, use_reentrant=True) + 2 * net.other(y)

    def whole(x):
        return checkpoint(net, x.requires_grad_(), use_reentrant=True)

    for batch, way in enumerate((net, whole, whole, net, in_part, net, whole, in_part)):
        side.optimizer.zero_grad()
        side.loss(batch, way).backward()
        side.optimizer.step()


@case()
def closure(side):
    for batch in range(3):
        side.optimizer.step(side.closure(batch))


@case()
def closure_with_one_of_two_passes(side):
    with_passes(side, 2)
    for batch in range(2):
        side.optimizer.step(side.closure(batch))


@case()
def several_closures_of_one_step(side):
    side.net = type(side.net)()
    plain = torch.optim.LBFGS(side.net.parameters(), lr=0.05, max_iter=3)
    side.optimizer = side.wrap(plain)

    def closure() -> torch.Tensor:
        loss = side.closure(0)().detach()
        return loss if side.is_alone else hpctrain.allreduce(loss)

    side.step = lambda _: side.optimizer.step(closure)
    side.step(0)


@case()
def some_synchronized_clipped_and_skipped(side):
    for batch in range(5):
        side.optimizer.zero_grad()
        side.backward(batch)
        if side.is_alone or batch == 2:
            clip_norm(side.net)
            side.optimizer.step()
            continue
        side.optimizer.synchronize()
        clip_norm(side.net)
        with side.optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            side.optimizer.step()
