"""``shard="node"``: what is done to gradients, which stay each rank's own, parts nobody."""

import pytest
from torch import nn

from hpctrain.core.errors import MismatchError
from tests.gradients.test_sharded_step import MANY, backward, wrapped


@MANY
def test_gradients_that_are_kept_count_as_they_did_or_all_ranks_raise(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    for step, first in enumerate((1, 1, 2)):  # samples of rank 0
        optimizer.set_num_samples(first + hvd.rank())
        backward(hvd, model, step)
        if step < 2:
            optimizer.step()
    with pytest.raises(MismatchError, match="counts other samples"):
        optimizer.step()


@MANY
def test_gradients_that_were_clipped_and_then_moved_are_an_error_on_all_ranks(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    backward(hvd, model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.share_memory()
    with pytest.raises(MismatchError, match="own gradient"):
        optimizer.step()


@MANY
def test_gradients_that_are_kept_after_a_clipped_step_are_an_error_on_all_ranks(hvd):
    model, optimizer = wrapped(hvd, shard="node")
    backward(hvd, model, 0)
    optimizer.clip_grad_norm_(1e-3)
    optimizer.step()
    with pytest.raises(MismatchError, match="after a step that was clipped"):
        optimizer.step()
