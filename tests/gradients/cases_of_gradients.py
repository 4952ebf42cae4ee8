"""What a program may do to ``.grad``, and in which order it may call backward and step."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gradients.cases import case, with_passes

# --- what is done to .grad ---


@case()
def clamp_of_data(side):
    side.backward()
    for p in side.net.parameters():
        p.grad.data = p.grad.data.clamp(-0.01, 0.01)
    side.optimizer.step()


@case()
def clamp_of_data_without_forgetting(side):
    clamp_of_data(side)
    side.optimizer.zero_grad(set_to_none=False)
    side.backward(1)
    side.optimizer.step()


@case()
def product_in_its_place(side):
    side.backward()
    for p in side.net.parameters():
        p.grad = p.grad * 0.5
    side.optimizer.step()


@case()
def product_of_some(side):
    side.backward()
    side.net.head.weight.grad = side.net.head.weight.grad * 0.5
    side.optimizer.step()


@case()
def product_then_two_steps(side):
    product_in_its_place(side)
    side.optimizer.step()


@case()
def change_in_place(side):
    side.backward()
    for p in side.net.parameters():
        p.grad.mul_(0.5).add_(0.01)
    side.optimizer.step()


@case()
def clip_by_norm(side):
    side.backward()
    nn.utils.clip_grad_norm_(side.net.parameters(), 0.01)
    side.optimizer.step()


@case()
def clip_by_value(side):
    side.backward()
    nn.utils.clip_grad_value_(side.net.parameters(), 0.01)
    side.optimizer.step()


@case()
def drop_one(side):
    side.backward()
    side.net.head.weight.grad = None
    side.optimizer.step()


@case()
def drop_one_and_go_on(side):
    drop_one(side)
    side.backward(1)
    side.optimizer.step()


@case()
def drop_all(side):
    side.backward()
    side.net.zero_grad()
    side.optimizer.step()
    side.step(1)


@case("Average")
def own_gradients_after_a_backward(side):
    side.backward()
    side.net.zero_grad()
    for p in side.net.parameters():
        p.grad = torch.full_like(p, side.x().mean().item())
    side.optimizer.step()


@case("Average")
def own_gradient_of_one_after_a_backward(side):
    side.backward()
    side.net.head.bias.grad = torch.full_like(side.net.head.bias, side.x().mean().item())
    side.optimizer.step()


@case()
def gradients_of_autograd_grad(side):
    found = torch.autograd.grad(side.loss(), list(side.net.parameters()))
    for p, gradient in zip(side.net.parameters(), found, strict=True):
        p.grad = gradient
    side.optimizer.step()


@case()
def transposed_square(side):
    side.backward()
    side.net.body.weight.grad = side.net.body.weight.grad.t()
    side.optimizer.step()


@case()
def swapped_between_parameters(side):
    side.backward()
    head, other = side.net.head.weight, side.net.other.weight
    head.grad, other.grad = other.grad, head.grad
    side.optimizer.step()


@case("refused")
def swapped_between_two_passes(side):
    side.optimizer.zero_grad(set_to_none=False)
    with_passes(side, 2)
    side.backward()
    head, other = side.net.head.weight, side.net.other.weight
    head.grad, other.grad = other.grad, head.grad
    side.backward(1)
    side.optimizer.step()


@case()
def zeroed_by_the_model(side):
    side.backward()
    side.net.zero_grad(set_to_none=False)
    side.backward(1)
    side.optimizer.step()


@case()
def skipped_step_then_zeroed_by_the_model(side):
    side.step()
    for batch in (1, 2, 3):
        side.net.zero_grad(set_to_none=False)
        side.backward(batch)
        if batch != 2:
            side.optimizer.step()


# --- order of backward and step ---


@case()
def backward_twice(side):
    side.backward()
    side.backward(1)
    side.optimizer.step()


@case()
def backward_after_a_change_in_place(side):
    side.backward()
    for p in side.net.parameters():
        p.grad.mul_(0.5)
    side.backward(1)
    side.optimizer.step()


@case()
def step_twice(side):
    side.backward()
    side.optimizer.step()
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


def replace_between_two_losses(side):
    side.optimizer.zero_grad()
    net = side.net
    side.loss(0, lambda x: net.head(torch.tanh(x))).backward()
    net.head.weight.grad = net.head.weight.grad / net.head.weight.grad.norm()
    side.loss(1, lambda x: net.other(torch.tanh(x))).backward()
    side.optimizer.step()


@case("Sum", "refused")
def a_sum_that_is_replaced_between_two_losses(side):
    replace_between_two_losses(side)


@case("Sum", "refused")
def a_sum_that_is_zeroed_on_one_rank_between_two_losses(side):
    side.optimizer.zero_grad()
    net = side.net
    side.loss(0, lambda x: net.head(torch.tanh(x))).backward()
    net.head.bias.grad = torch.full_like(net.head.bias, 0.1 * side.rank)
    side.loss(1, lambda x: net.other(torch.tanh(x))).backward()
    side.optimizer.step()


@case("Sum")
def a_sum_that_is_converted_and_zeroed_between_two_losses(side):
    side.optimizer.zero_grad()
    net = side.net
    side.loss(0, lambda x: net.head(torch.tanh(x))).backward()
    side.optimizer.step()
    net.float()
    net.double()
    side.optimizer.zero_grad(set_to_none=False)
    side.loss(1, lambda x: net.other(torch.tanh(x))).backward()
    side.optimizer.step()


@case("Average")
def an_average_that_is_replaced_between_two_losses(side):
    replace_between_two_losses(side)


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
    for batch in range(4):
        side.optimizer.zero_grad()
        way = side.net
        if batch % 2:
            way = lambda x: checkpoint(side.net, x.requires_grad_(), use_reentrant=True)  # noqa: E731
        side.loss(batch, way).backward()
        side.optimizer.step()


@case()
def closure(side):
    for batch in range(3):
        side.optimizer.step(side.closure(batch))


@case()
def synchronized_and_skipped(side):
    for batch in range(3):
        side.optimizer.zero_grad()
        side.backward(batch)
        if side.is_alone:
            side.optimizer.step()
            continue
        side.optimizer.synchronize()
        with side.optimizer.skip_synchronize():
            side.optimizer.step()


@case()
def skipped_without_synchronizing(side):
    found = torch.autograd.grad(side.loss(), list(side.net.parameters()))
    for p, gradient in zip(side.net.parameters(), found, strict=True):
        p.grad = gradient
    if side.is_alone:
        side.optimizer.step()
        return
    with side.optimizer.skip_synchronize():
        side.optimizer.step()
