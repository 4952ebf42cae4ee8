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
