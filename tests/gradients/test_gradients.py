"""Check that ``backward()`` leaves the average over all samples of all ranks in every gradient."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hpctrain.core.errors import ConfigError, MismatchError
from tests.gradients.training import (
    EVERY_SIZE,
    GLOBAL_BATCH,
    MANY,
    ONE_NODE,
    OVERLAPS,
    assert_close,
    backward,
    distributed,
    expected_gradients,
    global_batch,
    gradients,
    largest_difference,
    make_model,
    part_of,
    sgd,
    train_alone,
    train_together,
    wrapped,
)


@EVERY_SIZE
@OVERLAPS
def test_gradients_are_averaged_when_backward_returns(hvd):
    for by_model, set_to_none, passes in ((0, 1, 1), (0, 0, 2), (1, 1, 2), (1, 0, 1)):
        model, optimizer = wrapped(hvd, backward_passes_per_step=passes)
        for step in range(3):
            (model if by_model else optimizer).zero_grad(set_to_none=bool(set_to_none))
            batches = range(passes * step, passes * (step + 1))
            for batch in batches:
                backward(hvd, model, batch)
            each = zip(*map(expected_gradients, batches), strict=True)
            assert_close(gradients(model), [sum(parts) for parts in each])


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
            optimizer.synchronize()  # the end shows only in step()
        assert_close(gradients(model), gradients(alone))


@MANY
def test_dtypes_may_be_mixed(hvd):
    model = nn.Sequential(nn.Linear(64, 32).double(), nn.Linear(32, 10).float())
    optimizer = distributed(hvd, model)
    optimizer.zero_grad()
    images, labels = part_of(global_batch(0), hvd.rank(), hvd.size())
    cross_entropy(model[1](model[0](images).float()), labels).backward()
    for p in model.parameters():
        assert p.grad.dtype == p.dtype
        torch.testing.assert_close(hvd.allreduce(p.grad), p.grad)


@MANY
def test_averages_in_float16_do_not_overflow_where_the_average_does_not(hvd):
    model = nn.Linear(1, 1, bias=False).half()
    kept = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum().backward()
    assert model.weight.grad.item() == 40000
    assert kept


# Compression


@EVERY_SIZE
@ONE_NODE
@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_compressed_gradients_are_averages_to_their_precision(hvd, name):
    part = part_of(global_batch(0, torch.float32), hvd.rank(), hvd.size())
    model = make_model(torch.float32)
    optimizer = distributed(hvd, model, compression=getattr(hvd.Compression, name))
    cross_entropy(model(part[0]), part[1]).backward()
    precision = {"none": 1e-5, "fp16": 2**-10, "bf16": 2**-7}[name] if hvd.size() > 1 else 1e-5
    for grad, exact in zip(gradients(model), expected_gradients(), strict=True):
        assert grad.dtype is torch.float32
        atol = precision * float(exact.abs().max())
        torch.testing.assert_close(grad, exact.float(), rtol=precision, atol=atol)
        assert torch.equal(hvd.broadcast(grad, 0), grad)
    optimizer.step()


class Doubled:
    """Define a compressor as Horovod's users do: a class that is never instantiated."""

    @staticmethod
    def compress(tensor):
        return tensor.float() * 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor / 2).to(ctx)


@MANY
@ONE_NODE
def test_custom_compressor_is_applied_to_each_tensor(hvd):
    model, optimizer = wrapped(hvd, compression=Doubled)
    backward(hvd, model)
    for grad, exact in zip(gradients(model), expected_gradients(), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-7)
    optimizer.step()


@MANY
@ONE_NODE
def test_gradients_beyond_float16_stay_finite_in_a_node_with_and_without_predivision(hvd):
    model = nn.Linear(1, 1, bias=False)
    fp16 = hvd.Compression.fp16
    for factor in (1.0, 2.0):
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            plain, compression=fp16, gradient_predivide_factor=factor
        )
        model.zero_grad()
        model(torch.full((1, 1), 80000.0 if hvd.rank() else 0.0)).sum().backward()
        share = (hvd.size() - 1) / hvd.size()
        assert model.weight.grad.item() == pytest.approx(80000.0 * share, rel=1e-3)
        del optimizer


# Whole trainings


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_rank_is_bitwise_equal_to_the_plain_loop(hvd, dtype):
    together, alone = train_together(hvd, 20, dtype), train_alone(20, dtype)
    assert all(map(torch.equal, together.parameters(), alone.parameters()))


@MANY
@OVERLAPS
def test_ranks_train_as_one_process(hvd):
    assert largest_difference(train_together(hvd, 80), train_alone(80)) < 1e-13
    together, alone = train_together(hvd, 80, torch.float32), train_alone(80, torch.float32)
    assert largest_difference(together, alone) < 5e-6


@MANY
@OVERLAPS
def test_two_runs_and_all_ranks_have_the_same_bits(world, hvd):
    first, second = (train_together(hvd, 8, torch.float32) for _ in range(2))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    weights = torch.cat([p.detach().view(-1) for p in first.parameters()]).numpy().tobytes()
    assert len(set(world.allgather(weights))) == 1


@EVERY_SIZE
@OVERLAPS
def test_unequal_batches_are_weighted_by_their_samples(hvd):
    images, labels = global_batch(0)
    # Rank 0 has no sample, and each rank has more than the previous one; ``alone`` has all
    # samples.
    weights = list(range(hvd.size())) if hvd.size() > 1 else [1]
    ends = [0, *(GLOBAL_BATCH * sum(weights[: r + 1]) // sum(weights) for r in range(hvd.size()))]
    own = slice(ends[hvd.rank()], ends[hvd.rank() + 1])
    for nominal in (1.0, GLOBAL_BATCH / hvd.size()):
        model, optimizer = wrapped(hvd)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.set_num_samples(own.stop - own.start, nominal)
            if own.stop > own.start:
                cross_entropy(model(images[own]), labels[own]).backward()
            optimizer.synchronize()
            assert_close(gradients(model), expected_gradients())


def loss_of(model, own):
    """Return a loss whose gradients over no samples are NaN: it multiplies mean and weights."""
    images, labels = global_batch(0)
    size = sum(parameter.square().sum() for parameter in model.parameters())
    return cross_entropy(model(images[own]), labels[own]) * (1 + 0.01 * size)


@MANY
@OVERLAPS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_nan_with_a_weight_of_zero_stays_out_of_the_sum(hvd, set_to_none):
    alone, model = make_model(), make_model()
    loss_of(alone, slice(0, 0)).backward()
    assert all(gradient.isnan().all() for gradient in gradients(alone))
    plain, optimizer = sgd(alone), distributed(hvd, model)
    own = slice(0, 0 if hvd.rank() == 0 else GLOBAL_BATCH)
    for _ in range(3):
        plain.zero_grad()
        loss_of(alone, slice(0, GLOBAL_BATCH)).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.set_num_samples(own.stop)
        loss_of(model, own).backward()
        assert_close(gradients(model), gradients(alone))
        plain.step()
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@MANY
def test_a_count_on_some_ranks_only_is_an_error_on_all(hvd):
    model, optimizer = wrapped(hvd)
    if hvd.rank() == 0:
        optimizer.set_num_samples(5)
    with pytest.raises(MismatchError, match=f"1 of {hvd.size()} ranks have called it"):
        backward(hvd, model)


@EVERY_SIZE
@OVERLAPS
def test_flags_of_any_rank_are_seen_by_all_after_the_step(hvd):
    model, optimizer = wrapped(hvd)
    last = hvd.rank() == hvd.size() - 1
    for own, seen in ((0, 0), (0b0001 if last else 0b0100, 0b0101), (0b1010, 0b1010), (0, 0)):
        optimizer.raise_flags(own)
        backward(hvd, model)
        optimizer.step()
        assert optimizer.raised_flags == (seen if hvd.size() > 1 else own)
        optimizer.zero_grad()


def test_flags_beyond_bit_3_are_rejected(hvd):
    with pytest.raises(ConfigError, match="bits 0 to 3"):
        distributed(hvd, make_model()).raise_flags(0b10000)
