import shutil
from importlib import metadata
from pathlib import Path

import pytest

from hpctrain.launch.installed_horovod import Installed, installed, needed_by


@pytest.fixture
def package(tmp_path):
    """A Horovod as pip leaves it; returns what finds it."""

    def make(version, *, soname=b"\0libmpi.so.40\0"):
        info = tmp_path / f"horovod-{version}.dist-info"
        shutil.rmtree(info, ignore_errors=True)
        info.mkdir()
        (tmp_path / "horovod/torch").mkdir(parents=True, exist_ok=True)
        files = []
        if soname is not None:
            files.append("horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so")
            (tmp_path / files[0]).write_bytes(b"\x7fELF libmpi.so.99" + soname + b"libc.so.6\0")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n"
        )
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))

        def find(name):
            assert name == "horovod"
            return metadata.Distribution.at(info)

        return find

    return make


def test_a_wheel_is_known_by_its_version_and_the_mpi_that_its_module_needs(package):
    ours = installed(package("0.28.1+torch2.13.0.cpu.openmpi5.0.11"))
    assert ours == Installed(version="0.28.1", needs="libmpi.so.40")
    found = installed(package("0.28.1", soname=b"\0libmpi.so.12\0"))
    assert found == Installed(version="0.28.1", needs="libmpi.so.12")
    assert found.family == "mpich"


def test_a_wheel_without_an_engine_for_torch_needs_no_mpi(package):
    found = installed(package("0.28.1", soname=None))
    assert (found.needs, found.family) == ("", None)


def test_nothing_installed_is_none():
    def find(name):
        raise metadata.PackageNotFoundError(name)

    assert installed(find) is None


def test_a_module_that_cannot_be_read_needs_nothing(tmp_path):
    (tmp_path / "empty").touch()
    assert needed_by(tmp_path / "empty") == ""
    assert needed_by(Path("/nowhere")) == ""
