"""Check ``allreduce`` in its eight forms."""

import pytest
import torch

from hpctrain.core.errors import ConfigError, HpctrainDeprecationWarning

SIZES = pytest.mark.ranks(1, 2, 3, 4)


@SIZES
def test_all_forms_give_the_same_result(hvd):
    size, ranks = hvd.size(), range(hvd.size())
    for op, whole in (
        (hvd.Average, sum(ranks) / size),
        (hvd.Sum, sum(ranks)),
        (hvd.Min, 0),
        (hvd.Max, size - 1),
        (hvd.Product, 0),
    ):
        tensor = torch.full((3, 2), float(hvd.rank()))
        pair = [tensor.clone(), tensor.double()]
        results = [
            hvd.allreduce(tensor, op=op),
            hvd.synchronize(hvd.allreduce_async(tensor, op=op)),
            *hvd.grouped_allreduce(pair, op=op),
            *hvd.synchronize(hvd.grouped_allreduce_async(pair, op=op)),
        ]
        assert bool((tensor == hvd.rank()).all())
        assert bool((pair[0] == hvd.rank()).all())
        copies = [tensor.clone(), tensor.clone()]
        assert hvd.allreduce_(copies[0], op=op) is copies[0]
        assert hvd.synchronize(hvd.allreduce_async_(copies[1], op=op)) is copies[1]
        more = [tensor.clone(), tensor.double()]
        assert hvd.grouped_allreduce_(more, op=op)[1] is more[1]
        last = [tensor.clone()]
        assert hvd.synchronize(hvd.grouped_allreduce_async_(last, op=op))[0] is last[0]
        for result in (*results, *copies, *more, *last):
            torch.testing.assert_close(result.double(), torch.full((3, 2), whole).double())


@SIZES
def test_default_is_the_average_and_the_deprecated_argument_works(hvd):
    tensor = torch.tensor([float(hvd.rank())])
    mean = sum(range(hvd.size())) / hvd.size()
    assert hvd.allreduce(tensor).item() == pytest.approx(mean)
    with pytest.warns(HpctrainDeprecationWarning, match="op=Average"):
        assert hvd.allreduce(tensor, average=True).item() == pytest.approx(mean)
    with pytest.warns(HpctrainDeprecationWarning, match="op=Average"):
        assert hvd.allreduce_(tensor.clone(), average=False).item() == sum(range(hvd.size()))
    with pytest.raises(ValueError, match="must not both be given"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)


@SIZES
def test_compression_reduces_messages_and_restores_the_dtype(hvd):
    tensor = torch.tensor([1.0, 0.1])
    half = hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert half.dtype is torch.float32
    torch.testing.assert_close(half, tensor.half().float() * hvd.size(), rtol=1e-3, atol=0.0)
    first, second = hvd.grouped_allreduce(
        [tensor, torch.tensor([3])], op=hvd.Sum, compression=hvd.Compression.bf16
    )
    assert first.dtype is torch.float32
    assert second.tolist() == [3 * hvd.size()]


@SIZES
def test_adasum_of_parallel_tensors_is_their_mean(hvd):
    tensor = torch.tensor([3.0, -1.0])
    torch.testing.assert_close(hvd.allreduce(tensor, op=hvd.Adasum), tensor)
    with pytest.raises(ConfigError, match="floating point of 16 bits or more, got int64"):
        hvd.allreduce(torch.tensor([3]), op=hvd.Adasum)
    with pytest.raises(RuntimeError, match="Adasum; use allreduce"):
        hvd.reducescatter(tensor, op=hvd.Adasum)


@SIZES
def test_unsupported_tensors_are_rejected_before_anything_is_sent(hvd):
    refused = [
        (lambda: hvd.allreduce(torch.ones(2), op="max"), "op must be one of"),
        (lambda: hvd.allreduce([1.0]), "must get tensors, got list; send other"),
        (
            lambda: hvd.allreduce_(torch.ones(2, device="meta")),
            "have values, got .* meta",
        ),
        (lambda: hvd.allreduce_async(torch.eye(2).to_sparse()), "got sparse_coo"),
        (lambda: hvd.allreduce_(torch.ones(1).expand(3)), r"shape \(3,\).*clone\(\) first"),
        (lambda: hvd.grouped_allreduce_([torch.ones(1).expand(3)] * 2), "elements do not share"),
        (lambda: hvd.broadcast_(torch.ones(1, 2).expand(3, 2), 0), "elements do not share"),
        (lambda: hvd.allreduce(torch.ones(2).bool()), "use op=Max for 'any'"),
        (
            lambda: hvd.allreduce(torch.ones(2) * 1j, op=hvd.Max),
            "of ordered values, got complex64",
        ),
        (lambda: hvd.grouped_allreduce([]), "got an empty list"),
        (lambda: hvd.grouped_allreduce_(torch.ones(2)), "get a list of tensors, got Tensor"),
        (lambda: hvd.synchronize(7), "ending in _async, got int"),
        (lambda: hvd.poll(None), "ending in _async, got NoneType"),
    ]
    for call, message in refused:  # no rank waits: nothing was submitted
        with pytest.raises(ConfigError, match=message):
            call()
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match=message):
                call()
    assert hvd.allreduce(torch.ones(2).bool(), op=hvd.Max).tolist() == [True, True]
