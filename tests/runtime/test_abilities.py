"""Horovod's questions about what is there, answered with its types."""

import pytest

import hpctrain
from hpctrain.core.errors import NotInitializedError


@pytest.mark.ranks(1, 2)
def test_mpi_is_there_and_nothing_else(hvd):
    for yes in (hvd.mpi_enabled, hvd.mpi_built, hvd.mpi_threads_supported):
        assert yes() is True
    for no in (
        hvd.gloo_enabled,
        hvd.gloo_built,
        hvd.ddl_built,
        hvd.ccl_built,
        hvd.cuda_built,
        hvd.rocm_built,
    ):
        assert no() is False
    assert isinstance(hvd.nccl_built(), int)
    assert not hvd.nccl_built()


def test_before_init_nothing_is_enabled():
    assert hpctrain.mpi_built()
    assert not hpctrain.mpi_enabled()
    with pytest.raises(NotInitializedError):
        hpctrain.mpi_threads_supported()
