"""Horovod's queries for built and enabled features return its types."""

import pytest

import hpctrain
from hpctrain.core.errors import NotInitializedError


@pytest.mark.ranks(1, 2)
def test_only_mpi_is_enabled(hvd):
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


def test_nothing_is_enabled_before_init():
    assert hpctrain.mpi_built()
    assert not hpctrain.mpi_enabled()
    with pytest.raises(NotInitializedError):
        hpctrain.mpi_threads_supported()
