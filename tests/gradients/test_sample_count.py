"""Gradients count as much as the samples they are the mean of."""

import pytest
from torch.nn.functional import cross_entropy

from hpctrain.core.errors import ConfigError, MismatchError
from tests.gradients.training import (
    EVERY_SIZE,
    GLOBAL_BATCH,
    MANY,
    OVERLAPS,
    assert_close,
    backward,
    distributed,
    expected_gradients,
    global_batch,
    gradients,
    make_model,
    sgd,
)


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
    model = make_model()
    optimizer = distributed(hvd, model)
    if hvd.rank() == 0:
        optimizer.set_num_samples(5)
    with pytest.raises(MismatchError, match=f"1 of {hvd.size()} have called it"):
        backward(hvd, model)


@EVERY_SIZE
@OVERLAPS
def test_flags_of_any_rank_are_seen_by_all_after_the_step(hvd):
    model = make_model()
    optimizer = distributed(hvd, model)
    last = hvd.rank() == hvd.size() - 1
    for own, seen in ((0, 0), (0b0001 if last else 0b0100, 0b0101), (0b1010, 0b1010), (0, 0)):
        optimizer.raise_flags(own)
        backward(hvd, model)
        optimizer.step()
        assert optimizer.raised_flags == (seen if hvd.size() > 1 else own)
        optimizer.zero_grad()


def test_other_flags_are_refused(hvd):
    with pytest.raises(ConfigError, match="bits 0 to 3"):
        distributed(hvd, make_model()).raise_flags(0b10000)
