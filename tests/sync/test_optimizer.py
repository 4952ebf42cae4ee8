"""What scripts do to gradients and optimizers: all of it sees the average over all ranks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hpctrain.errors import ConfigError, MismatchError
from tests.sync.training import (
    GLOBAL_BATCH,
    global_batch,
    gradients,
    largest_difference,
    make_model,
    part_of,
    sgd,
)

EVERY_SIZE = pytest.mark.ranks(1, 2, 3, 4)
MANY = pytest.mark.ranks(2, 3, 4)
OVERLAPS = pytest.mark.usefixtures("overlap")


def expected_gradients(step=0):
    model = make_model()
    images, labels = global_batch(step)
    cross_entropy(model(images), labels).backward()
    return gradients(model)


def distributed(hvd, model, **options):
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def backward(hvd, model, step=0):
    images, labels = part_of(global_batch(step), hvd.rank(), hvd.size())
    cross_entropy(model(images), labels).backward()


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)


@EVERY_SIZE
@OVERLAPS
def test_gradients_are_averaged_when_backward_returns(hvd):
    model = make_model()
    optimizer = distributed(hvd, model)
    for step in range(4):
        optimizer.zero_grad()
        backward(hvd, model, step)
        assert_close(gradients(model), expected_gradients(step))


@EVERY_SIZE
@OVERLAPS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_both_forms_of_zero_grad(hvd, set_to_none, owner):
    model = make_model()
    optimizer = distributed(hvd, model)
    for step in range(4):
        (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=set_to_none)
        backward(hvd, model, step)
        assert_close(gradients(model), expected_gradients(step))


@EVERY_SIZE
def test_sum_is_the_average_times_the_ranks(hvd):
    model = make_model()
    distributed(hvd, model, op=hvd.Sum)
    backward(hvd, model)
    assert_close(gradients(model), [g * hvd.size() for g in expected_gradients()])


@EVERY_SIZE
@OVERLAPS
def test_passes_are_added_up_before_one_reduction(hvd):
    model = make_model()
    optimizer = distributed(hvd, model, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        backward(hvd, model, 2 * step)
        backward(hvd, model, 2 * step + 1)
        both = zip(expected_gradients(2 * step), expected_gradients(2 * step + 1), strict=True)
        assert_close(gradients(model), [a + b for a, b in both])
        optimizer.step()
        model.load_state_dict(make_model().state_dict())


@MANY
def test_a_second_backward_without_zero_grad_adds_its_average(hvd):
    model = make_model()
    distributed(hvd, model)
    backward(hvd, model, 0)
    backward(hvd, model, 1)
    both = zip(expected_gradients(0), expected_gradients(1), strict=True)
    assert_close(gradients(model), [a + b for a, b in both])


@EVERY_SIZE
@OVERLAPS
def test_unequal_batches_are_weighted_by_their_samples(hvd):
    images, labels = global_batch(0)
    # Rank 0 has no sample at all, the others ever more; alone it has them all.
    weights = list(range(hvd.size())) if hvd.size() > 1 else [1]
    ends = [0, *(GLOBAL_BATCH * sum(weights[: r + 1]) // sum(weights) for r in range(hvd.size()))]
    own = slice(ends[hvd.rank()], ends[hvd.rank() + 1])
    for nominal in (1.0, GLOBAL_BATCH / hvd.size()):
        model = make_model()
        optimizer = distributed(hvd, model)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.set_num_samples(own.stop - own.start, nominal)
            if own.stop > own.start:
                cross_entropy(model(images[own]), labels[own]).backward()
            optimizer.synchronize()
            assert_close(gradients(model), expected_gradients())


@MANY
def test_a_mean_over_no_samples_does_not_poison_the_others(hvd):
    images, labels = global_batch(0)
    own = slice(0, 0) if hvd.rank() == 0 else slice(0, GLOBAL_BATCH)
    model = make_model()
    optimizer = distributed(hvd, model)
    optimizer.set_num_samples(own.stop)
    cross_entropy(model(images[own]), labels[own]).backward()  # NaN on rank 0
    assert_close(gradients(model), expected_gradients())


@MANY
def test_a_count_on_some_ranks_only_is_an_error_on_all(hvd):
    model = make_model()
    optimizer = distributed(hvd, model)
    if hvd.rank() == 0:
        optimizer.set_num_samples(5)
    with pytest.raises(MismatchError, match=f"1 of {hvd.size()} have called it"):
        backward(hvd, model)


class Branches(nn.Module):
    """Uses one of two layers, and never the third."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right, self.never = (nn.Linear(64, 10).double() for _ in range(3))

    def forward(self, images, *, left):
        return self.left(images) if left else self.right(images)


@MANY
@OVERLAPS
def test_parameters_without_gradient_add_zeros_or_stay_none(hvd):
    model, alone = Branches(), Branches()
    distributed(hvd, model)
    images, labels = global_batch(0)
    for rank in range(hvd.size()):
        x, y = part_of((images, labels), rank, hvd.size())
        (cross_entropy(alone(x, left=rank == 0), y) / hvd.size()).backward()
    for _ in range(3):
        model.zero_grad()
        x, y = part_of((images, labels), hvd.rank(), hvd.size())
        cross_entropy(model(x, left=hvd.rank() == 0), y).backward()
        assert_close(gradients(model), gradients(alone))
        assert model.never.weight.grad is None


@MANY
def test_a_rank_may_skip_backward(hvd):
    model = make_model()
    optimizer = distributed(hvd, model)
    before = [p.detach().clone() for p in model.parameters()]
    if hvd.rank() == 0:
        images, labels = global_batch(0)
        cross_entropy(model(images), labels).backward()
    optimizer.step()
    for p, old, g in zip(model.parameters(), before, expected_gradients(), strict=True):
        torch.testing.assert_close(p.detach(), old - 0.01 * g / hvd.size(), rtol=1e-11, atol=1e-14)


@MANY
def test_parameters_added_later_are_averaged_too(hvd):
    torch.manual_seed(0)
    first, second = nn.Linear(64, 10).double(), nn.Linear(64, 10).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    images, labels = part_of(global_batch(0), hvd.rank(), hvd.size())
    cross_entropy(first(images), labels).backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(second.parameters())})
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(first(images) + second(images), labels).backward()
        grads = torch.cat([p.grad.view(-1) for p in [*first.parameters(), *second.parameters()]])
        assert torch.equal(hvd.allreduce(grads), grads) or hvd.size() == 3
        torch.testing.assert_close(hvd.allreduce(grads), grads)


@MANY
def test_a_model_that_changes_its_dtype_is_laid_out_again(hvd):
    model = make_model(torch.float32)
    optimizer = distributed(hvd, model)
    images, labels = part_of(global_batch(0, torch.float32), hvd.rank(), hvd.size())
    cross_entropy(model(images), labels).backward()
    optimizer.zero_grad()
    model.load_state_dict(make_model().state_dict())
    model.double()
    expected = make_model(torch.float32).double()
    images, labels = global_batch(0)
    cross_entropy(expected(images), labels).backward()
    backward(hvd, model)
    assert_close(gradients(model), gradients(expected))


@MANY
@OVERLAPS
@pytest.mark.parametrize("whole", [True, False])
def test_shared_layers_under_reentrant_checkpointing(hvd, whole):
    def make():
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(64, 64).double(), nn.Linear(64, 10).double()])

    def forward(model, images, *, reentrant):
        hidden, last = model
        if not reentrant:
            return last(hidden(hidden(images)))
        twice = checkpoint(
            hidden, checkpoint(hidden, images, use_reentrant=True), use_reentrant=True
        )
        return checkpoint(last, twice, use_reentrant=True) if whole else last(twice)

    model, alone = make(), make()
    optimizer = distributed(hvd, model)
    images, labels = global_batch(0)
    cross_entropy(forward(alone, images, reentrant=False), labels).backward()
    images, labels = part_of((images, labels), hvd.rank(), hvd.size())
    for step in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(forward(model, images.requires_grad_(), reentrant=True), labels)
        loss.backward()
        if whole and step == 0:
            optimizer.synchronize()  # the end of the first such backward shows only in step()
        assert_close(gradients(model), gradients(alone))


@MANY
def test_dtypes_may_be_mixed(hvd):
    model = nn.Sequential(nn.Linear(64, 32).double(), nn.Linear(32, 10).float())
    distributed(hvd, model)
    images, labels = part_of(global_batch(0), hvd.rank(), hvd.size())
    cross_entropy(model[1](model[0](images).float()), labels).backward()
    for p in model.parameters():
        assert p.grad.dtype == p.dtype
        torch.testing.assert_close(hvd.allreduce(p.grad), p.grad)


@MANY
def test_sparse_gradients_become_dense_averages(hvd):
    table = nn.Embedding(10, 3, sparse=True).double()
    hvd.broadcast_parameters(table.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank(), 9])).sum().backward()
        expected = torch.zeros(10, 3).double()
        expected[: hvd.size()] = 1 / hvd.size()
        expected[9] = 1
        torch.testing.assert_close(table.weight.grad, expected)


@MANY
def test_gradients_that_were_replaced_are_taken_as_they_are(hvd):
    model = make_model()
    optimizer = distributed(hvd, model)
    for _ in range(2):
        optimizer.zero_grad()
        backward(hvd, model)
        for p in model.parameters():
            p.grad = torch.full_like(p, hvd.rank())
        backward(hvd, model)
        mean = sum(range(hvd.size())) / hvd.size()
        assert_close(gradients(model), [mean + g for g in expected_gradients()])


@MANY
def test_clipping_sees_averages(hvd):
    model, alone = make_model(), make_model()
    distributed(hvd, model)
    images, labels = global_batch(0)
    cross_entropy(alone(images), labels).backward()
    backward(hvd, model)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, alone)]
    torch.testing.assert_close(*norms)
    assert_close(gradients(model), gradients(alone))


@MANY
def test_a_scaler_skips_the_step_on_all_ranks_together(hvd):
    model = make_model(torch.float32)
    optimizer = distributed(hvd, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    for overflow in (True, False):
        optimizer.zero_grad()
        images, labels = part_of(global_batch(0, torch.float32), hvd.rank(), hvd.size())
        loss = cross_entropy(model(images), labels)
        scaler.scale(loss * float("inf") if overflow and hvd.rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, (p.detach() for p in model.parameters())))
        assert same is overflow
    assert scaler.get_scale() == 2.0


@MANY
@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.001, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.001, foreach=True),
    ],
    ids=["sgd foreach", "sgd fused", "adamw fused", "adam foreach"],
)
def test_foreach_and_fused_optimizers_step_on_averages(hvd, kind):
    model, alone = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(kind(model.parameters())), kind(alone.parameters())
    for step in range(5):
        for m, o, batch in (
            (model, optimizer, part_of(global_batch(step), hvd.rank(), hvd.size())),
            (alone, plain, global_batch(step)),
        ):
            o.zero_grad()
            cross_entropy(m(batch[0]), batch[1]).backward()
            o.step()
    assert largest_difference(model, alone) < 1e-9


@MANY
def test_convolutions_in_channels_last_keep_their_layout(hvd):
    torch.manual_seed(0)
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    images = torch.full((2, 4, 8, 8), float(hvd.rank())).to(memory_format=torch.channels_last)
    model(images).sum().backward()
    assert model.weight.grad.stride() == model.weight.stride()
    torch.testing.assert_close(hvd.allreduce(model.weight.grad), model.weight.grad.contiguous())


@EVERY_SIZE
def test_schedulers_made_before_and_after_go_on_to_work(hvd):
    model = make_model()
    plain = sgd(model)
    before = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    backward(hvd, model)
    optimizer.step()
    before.step()
    after.step()
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 * 0.1)
    assert_close(gradients(model), expected_gradients())


@EVERY_SIZE
def test_a_closure_is_evaluated_on_averages(hvd):
    model, alone = make_model(), make_model()
    kind = torch.optim.LBFGS
    optimizer, plain = hvd.DistributedOptimizer(kind(model.parameters())), kind(alone.parameters())

    def closure(m, o, batch, average):
        def evaluate():
            o.zero_grad()
            loss = cross_entropy(m(batch[0]), batch[1])
            loss.backward()
            return average(loss.detach())

        return evaluate

    own = part_of(global_batch(0), hvd.rank(), hvd.size())
    optimizer.step(closure(model, optimizer, own, hvd.allreduce))
    plain.step(closure(alone, plain, global_batch(0), lambda loss: loss))
    assert largest_difference(model, alone) < 1e-8


@MANY
def test_different_models_are_an_error_on_every_rank(hvd):
    model = nn.Linear(4, 5 if hvd.rank() == hvd.size() - 1 else 3)
    with pytest.raises(MismatchError, match=r"parameters must be the same.*\(5, 4\)"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@EVERY_SIZE
def test_arguments_are_checked(hvd):
    model = make_model()
    with pytest.raises(ConfigError, match="backward_passes_per_step"):
        distributed(hvd, model, backward_passes_per_step=0)
    with pytest.raises(ConfigError, match="got twice: a"):
        hvd.DistributedOptimizer(sgd(model), [("a", p) for p in model.parameters()])
    optimizer = distributed(hvd, model)
    with pytest.raises(ConfigError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
