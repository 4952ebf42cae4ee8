"""Node memory: cut without gaps, alive as long as its tensors, an error when too little."""

import gc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.bucket import ALIGN, slice_bounds
from hpctrain.comm.factory import connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.core.config import Settings
from hpctrain.core.errors import NodeMemoryError
from tests.comm.conftest import close


@given(st.integers(0, 10**12), st.integers(1, 256))
def test_slices_cover_everything_once_and_share_no_cache_line(numel, parts):
    bounds = [slice_bounds(numel, parts, part) for part in range(parts)]
    assert bounds[0].start == 0
    assert bounds[-1].stop == numel
    for left, right in pairwise(bounds):
        assert left.stop == right.start
        assert left.stop % ALIGN == 0 or left.stop == numel


@pytest.mark.ranks(2, 3, 4)
def test_a_bucket_lives_as_long_as_its_tensor(world):
    connection = connect(find_world(), Settings())
    flat = connection.comm.new_bucket(50_000, torch.float32).flat
    close(connection)
    del connection
    gc.collect()
    flat.fill_(world.rank)
    assert flat.sum().item() == 50_000 * world.rank


@pytest.mark.ranks(2, 3, 4)
def test_too_large_a_bucket_is_an_error_on_every_rank():
    connection = connect(find_world(), Settings())
    with pytest.raises(NodeMemoryError, match=r"need .* of shared memory and .* are left"):
        connection.comm.new_bucket(1 << 48, torch.uint8)
    connection.comm.barrier()
    close(connection)


@pytest.mark.ranks(2, 4)
def test_ranks_that_cannot_share_memory_go_flat_and_say_so():
    connection = connect(find_world(), Settings(shared_memory="off"))
    assert connection.plan.node_memory == "none"
    assert any("flat over MPI" in note for note in connection.notes)
    close(connection)


@pytest.mark.ranks(2, 3, 4)
def test_buckets_need_no_descriptors():
    connection = connect(find_world(), Settings())
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = [connection.comm.new_bucket(1000, torch.float32) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(kept) == 20
    close(connection)
