import pytest

from hpctrain.doctor.host.engines import check
from hpctrain.launch.installed_horovod import Installed
from tests.doctor.host.healthy import MPICH, only, with_

BUILT = Installed(version="0.28.1", torch="2.13.0", mpi="openmpi5.0.11", needs="libmpi.so.40")
WANTED = {"HPCTRAIN_ENGINE": "horovod"}


def test_without_horovod_it_says_how_to_get_it():
    finding = only(check(with_()))
    assert finding.level == "ok"
    assert "hpctrain horovod build" in finding.what
    asked_for = only(check(with_(WANTED)))
    assert (asked_for.level, asked_for.do) == ("error", "hpctrain horovod build")


@pytest.mark.parametrize("environ", [{}, WANTED])
def test_a_horovod_that_fits_is_shown(environ):
    finding = only(check(with_(environ, horovod=BUILT, mpi={"version": "openmpi5.0.11"})))
    assert finding.level == "ok"
    assert "Horovod 0.28.1, built for torch 2.13.0 and Open MPI 5.0.11" in finding.what


def other(**changes):
    return Installed(**{name: getattr(BUILT, name) for name in BUILT.__slots__} | changes)


@pytest.mark.parametrize(
    ("horovod", "mpi", "text"),
    [
        (other(torch="2.12.1.cpu"), {}, "built for torch 2.12.1.cpu, torch is 2.13.0"),
        (BUILT, {"version": "openmpi5.0.12"}, "Open MPI 5.0.11, ranks load Open MPI 5.0.12"),
        (BUILT, {"library": MPICH}, "it loads Open MPI, ranks load MPICH"),
        (other(needs=""), {}, "without torch or without MPI"),
    ],
)
def test_a_wheel_for_something_else_is_named_with_the_way_out(horovod, mpi, text):
    finding = only(check(with_(horovod=horovod, mpi=mpi)))
    assert (finding.level, finding.do) == ("warning", "hpctrain horovod build")
    assert text in finding.what
    assert only(check(with_(WANTED, horovod=horovod, mpi=mpi))).level == "error"


@pytest.mark.parametrize("torch", ["2.13.0.cpu", "2.13.0+cpu", ""])
def test_what_follows_the_plus_may_be_left_out(torch):
    assert only(check(with_(horovod=other(torch=torch, mpi="")))).level == "ok"
