"""Parts of buckets."""

import pytest
import torch

from hpctrain.comm.ops import Op


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64])
def test_a_part_is_reduced_as_a_tensor_is_and_the_rest_stays(comm, dtype):
    bucket = comm.new_bucket(1 << 16, torch.uint8)
    bucket.flat.fill_(comm.rank + 1)
    for numel in (1000, 1, 4097, 0):
        part = bucket.part(numel, dtype)
        values = (torch.arange(numel) % 7 + comm.rank).to(dtype)
        part.flat.copy_(values)
        comm.allreduce_(part, op=Op.SUM).wait()
        comm.allreduce_(values, op=Op.SUM).wait()
        assert torch.equal(part.flat, values)
    rest = bucket.flat[4097 * dtype.itemsize :]
    assert bool((rest == comm.rank + 1).all())
