"""Gradients that travel in another form are averages, to the precision of that form."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.gradients.training import (
    EVERY_SIZE,
    MANY,
    ONE_NODE,
    backward,
    distributed,
    expected_gradients,
    global_batch,
    gradients,
    make_model,
    part_of,
)

pytestmark = ONE_NODE


@EVERY_SIZE
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
    """A compressor as Horovod's users write it: a class, never made an object."""

    @staticmethod
    def compress(tensor):
        return tensor.float() * 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor / 2).to(ctx)


@MANY
def test_a_compressor_of_somebody_else_is_used_tensor_by_tensor(hvd):
    model = make_model()
    optimizer = distributed(hvd, model, compression=Doubled)
    backward(hvd, model)
    for grad, exact in zip(gradients(model), expected_gradients(), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-7)
    optimizer.step()


@MANY
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
