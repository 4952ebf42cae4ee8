from importlib import metadata
from pathlib import Path

import pytest

from hpctrain.launch.installed_horovod import needed_by, needed_mpi


@pytest.fixture
def package(tmp_path):
    """A Horovod as pip leaves it; returns what finds it."""

    def make(version, soname):
        info = tmp_path / f"horovod-{version}.dist-info"
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


@pytest.mark.parametrize(
    ("soname", "needed"),
    [(b"\0libmpi.so.40\0", "libmpi.so.40"), (b"\0libmpi.so.12\0", "libmpi.so.12"), (None, "")],
)
def test_the_mpi_is_the_one_that_the_module_for_torch_was_linked_with(package, soname, needed):
    assert needed_mpi(package("0.28.1+torch2.13.0.cpu", soname)) == needed


def test_without_a_horovod_there_is_none():
    def find(name):
        raise metadata.PackageNotFoundError(name)

    assert needed_mpi(find) is None


def test_a_module_that_cannot_be_read_needs_nothing(tmp_path):
    (tmp_path / "empty").touch()
    assert needed_by(tmp_path / "empty") == ""
    assert needed_by(Path("/nowhere")) == ""
