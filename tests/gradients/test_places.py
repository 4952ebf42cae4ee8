"""Check that accelerator gradients obey the laws of host gradients, summed on host or device."""

import pytest
import torch

from hpctrain.comm import bucket_storage
from tests.gradients import test_programs as programs
from tests.gradients.test_gradients import (  # noqa: F401 - the same laws
    test_averages_in_float16_do_not_overflow_where_the_average_does_not,
    test_compressed_gradients_are_averages_to_their_precision,
    test_dtypes_may_be_mixed,
    test_gradients_are_averaged_when_backward_returns,
    test_nan_with_a_weight_of_zero_stays_out_of_the_sum,
    test_unequal_batches_are_weighted_by_their_samples,
)
from tests.gradients.test_sparse_gradients import (  # noqa: F401
    test_sparse_gradients_are_averages_on_any_ranks_at_any_time,
)
from tests.gradients.training import MANY, wrapped
from tests.stand_in import StandIn

pytestmark = pytest.mark.requires("own-engine")


@pytest.fixture(autouse=True, scope="module", params=("StagedBucket", "PeerBucket"))
def way(request):
    """Treat host tensors as tensors of an accelerator; return the bucket class that sums them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_storage, "device_of", StandIn)
        patch.setenv("HPCTRAIN_DEVICE_SUMS", "host" if request.param == "StagedBucket" else "auto")
        yield request.param


@pytest.fixture(scope="module", params=("thread",))
def overlap(request):
    """Send gradients during backward, as on accelerators."""
    return request.param


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", range(4))
def test_scripts_train_as_replicas_of_plain_torch_do(world, worlds, seed):
    worlds.leave()
    programs.test_a_script_trains_as_replicas_of_plain_torch_do(world, seed)


@MANY
def test_bucket_class_is_selected_and_codecs_use_the_host(hvd, way):
    for compression, expected in (("none", way), ("int8", "StagedBucket")):
        _, optimizer = wrapped(hvd, compression=compression)
        buckets = optimizer._exchange.reduction.layout.buckets
        assert {type(bucket.storage).__name__ for bucket in buckets} == {expected}


@MANY
def test_memory_of_a_deleted_wrap_is_reused(hvd, way):
    if way == "StagedBucket":
        return
    seen = []
    for _ in range(3):
        model, optimizer = wrapped(hvd)
        seen.append(
            [b.storage.flat.data_ptr() for b in optimizer._exchange.reduction.layout.buckets]
        )
        model(torch.ones(2, 64).double()).sum().backward()
        del model, optimizer
    assert seen[1] == seen[2]
