"""A rank without samples leaves the sum as it is, whatever its own gradients hold."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.gradients.training import (
    GLOBAL_BATCH,
    MANY,
    OVERLAPS,
    assert_close,
    distributed,
    global_batch,
    gradients,
    make_model,
    sgd,
)


def loss_of(model: nn.Module, own: slice) -> torch.Tensor:
    """Return a loss whose gradients over no samples are NaN: it multiplies mean and weights."""
    images, labels = global_batch(0)
    size = sum(parameter.square().sum() for parameter in model.parameters())
    return cross_entropy(model(images[own]), labels[own]) * (1 + 0.01 * size)


def test_gradients_over_no_samples_are_not_a_number_here():
    model = make_model()
    loss_of(model, slice(0, 0)).backward()
    assert all(gradient.isnan().all() for gradient in gradients(model))


@MANY
@OVERLAPS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_nan_with_a_weight_of_zero_stays_out_of_the_sum(hvd, set_to_none):
    alone, model = make_model(), make_model()
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
