import pytest

from hpctrain.core.units import MIB
from hpctrain.doctor.host.facts import Card
from hpctrain.doctor.host.network import (
    check,
    check_copies,
    check_fork,
    check_memlock,
    slow_settings,
)
from tests.doctor.host.healthy import HEALTHY, INFINIBAND, SLINGSHOT, only, with_

DOWN = Card(name="mlx5_0", family="infiniband", is_live=False)


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_MCA_pml": "ob1"},
        {"OMPI_MCA_btl": "tcp,self"},
        {"UCX_TLS": "tcp,self,sm"},
        {"FI_PROVIDER": "tcp"},
        {"FI_PROVIDER": "tcp;ofi_rxm"},
        {"I_MPI_OFI_PROVIDER": "sockets"},
        {"I_MPI_FABRICS": "shm:tcp"},
    ],
)
def test_a_fast_card_that_is_not_used_is_a_warning(environ):
    (name,) = environ
    found = only(check(with_(environ, network={"cards": (INFINIBAND,)})))
    assert found.level == "warning"
    assert f"{name}={environ[name]}" in found.what
    assert found.do == f"unset {name}"
    assert only(check(with_(environ))).level == "ok"


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_MCA_pml": "ucx", "OMPI_MCA_btl": "self,tcp"},
        {"OMPI_MCA_btl": "^openib"},
        {"UCX_TLS": "rc,sm,self"},
        {"UCX_TLS": "ib,tcp"},
        {"UCX_TLS": "^tcp"},
        {"UCX_TLS": "self,sm"},
        {"FI_PROVIDER": "verbs"},
        {"I_MPI_FABRICS": "shm:ofi"},
        {"OMPI_MCA_pml": ""},
    ],
)
def test_other_settings_are_left_alone(environ):
    assert slow_settings(environ) == []


def test_a_card_that_is_down_is_a_note():
    found = only(check(with_({"OMPI_MCA_pml": "ob1"}, network={"cards": (DOWN,)})))
    assert found.level == "note"


def test_a_wheel_knows_no_slingshot():
    cards = {"cards": (SLINGSHOT,)}
    assert only(check(with_(network=cards))).level == "warning"
    assert only(check(with_(network=cards, mpi={"is_wheel": False}))).level == "ok"


@pytest.mark.parametrize(
    ("card", "limit", "level"),
    [
        (INFINIBAND, 8 * MIB, "warning"),
        (INFINIBAND, None, "ok"),
        (DOWN, 8 * MIB, "ok"),
        (SLINGSHOT, 8 * MIB, "ok"),
    ],
)
def test_a_limit_of_locked_memory_is_a_warning_where_a_card_needs_it(card, limit, level):
    network = {"cards": (card,), "memlock_bytes": limit}
    assert only(check_memlock(with_(network=network))).level == level


@pytest.mark.parametrize(
    ("kernel", "environ", "level"),
    [
        ((4, 18), {}, "warning"),
        ((4, 18), {"RDMAV_FORK_SAFE": "0"}, "warning"),
        ((4, 18), {"RDMAV_FORK_SAFE": "1"}, "ok"),
        ((4, 18), {"IBV_FORK_SAFE": "1"}, "ok"),
        ((5, 12), {}, "ok"),
        ((), {}, "ok"),
    ],
)
def test_forks_on_an_old_kernel_with_infiniband_are_a_warning(kernel, environ, level):
    network = {"cards": (INFINIBAND,), "kernel": kernel}
    assert only(check_fork(with_(environ, network=network))).level == level
    assert only(check_fork(with_(environ, network={"kernel": kernel}))).level == "ok"


def test_ranks_that_may_not_copy_from_each_other_are_a_warning():
    found = only(check_copies(with_(network={"copy_error": "Operation not permitted"})))
    assert found.level == "warning"
    assert "OMPI_MCA_btl_vader_single_copy_mechanism=none" in found.do
    assert only(check_copies(HEALTHY)).level == "ok"
