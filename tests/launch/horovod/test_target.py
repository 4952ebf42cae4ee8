from dataclasses import fields, replace
from pathlib import Path

import pytest

from hpctrain.launch.horovod.mpi import Mpi
from hpctrain.launch.horovod.target import Target, name_of, parts_of, target_of

TARGET = Target(
    torch="2.13.0+cpu",
    mpi="openmpi5.0.11",
    place="",
    gpu="",
    python="cp311",
    machine="linux_x86_64",
    horovod="0.28.1",
)


@pytest.mark.parametrize("name", [field.name for field in fields(Target)])
def test_another_version_of_anything_is_another_key(name):
    assert replace(TARGET, **{name: "other"}).key != TARGET.key


def test_a_key_is_a_name_of_a_folder():
    assert TARGET.key == "horovod0.28.1-cp311-linux_x86_64-torch2.13.0+cpu-openmpi5.0.11-r1"
    assert "/" not in TARGET.key


@pytest.mark.parametrize("gpu", ["", "nccl"])
@pytest.mark.parametrize("mpi", ["openmpi5.0.11", "mpich5.0.2", "intelmpi2021.12", "mpi0a1b2c3d"])
@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.13.0", "2.14.0.dev20261101+cu130"])
def test_a_version_says_what_the_wheel_was_built_for(torch, mpi, gpu):
    target = replace(TARGET, torch=torch, mpi=mpi, gpu=gpu)
    assert parts_of(f"0.28.1+{target.label}") == (torch.replace("+", "."), mpi)


@pytest.mark.parametrize("version", ["0.28.1", "0.28.1+site4", "0.28.1+torch2.13"])
def test_the_version_of_another_wheel_says_nothing(version):
    assert parts_of(version) == ("", "")


def test_names_of_mpi_are_written_out():
    assert name_of("openmpi5.0.11") == "Open MPI 5.0.11"
    assert name_of("mpich5.0.2") == "MPICH 5.0.2"


def test_libraries_of_a_site_are_told_apart_by_their_place():
    here = Mpi(vendor="openmpi", version="5.0.11", library=Path("/opt/a/lib/libmpi.so.40"))
    there = replace(here, library=Path("/opt/b/lib/libmpi.so.40"))
    assert target_of("2.13.0", here).key != target_of("2.13.0", there).key
    assert target_of("2.13.0", here).label == target_of("2.13.0", there).label
