from pathlib import Path

import pytest

from hpctrain.doctor.host.facts import Reached
from hpctrain.doctor.host.gather import libraries_in, reached
from hpctrain.doctor.host.library import check
from tests.doctor.host.healthy import HEALTHY, LIBRARY, MPICH, SITE, SRUN, only, with_


def beside(library, by, program=None):
    return (*HEALTHY.mpi.reached, Reached(library=library, by=by, program=program))


def test_the_library_and_what_srun_needs_for_it_are_told():
    found = only(check(HEALTHY))
    assert (found.level, str(LIBRARY) in found.what) == ("ok", True)
    assert "srun --mpi=pmix" in found.what
    assert "srun --mpi=pmi2" in only(check(with_(mpi={"library": MPICH, "reached": ()}))).what


def test_no_library_is_an_error_with_the_way_out():
    found = only(check(with_(mpi={"error": "mpi4py finds none; load a module"})))
    assert (found.level, found.what, found.do) == ("error", "mpi4py finds none", "load a module")


@pytest.mark.parametrize("library", [SITE, MPICH])
def test_a_wheel_that_hides_the_sites_library_is_a_warning(library):
    found = only(check(with_(mpi={"reached": beside(library, "LD_LIBRARY_PATH")})))
    assert found.level == "warning"
    assert f"the pip package's {LIBRARY}" in found.what
    assert f"export MPI4PY_LIBMPI={library}" in found.do


def test_a_library_that_was_chosen_hides_none():
    reach = beside(SITE, "LD_LIBRARY_PATH")
    found = only(check(with_({"MPI4PY_LIBMPI": str(LIBRARY)}, mpi={"reached": reach})))
    assert found.level == "note"


def test_an_mpirun_of_another_library_is_a_warning_where_it_was_chosen():
    module = beside(SITE, "mpirun", Path("/opt/openmpi/bin/mpirun"))
    found = only(check(with_(mpi={"reached": module})))
    assert found.level == "warning"
    assert "/opt/openmpi/bin/mpirun" in found.what
    assert "hpctrain launch" in found.do


def test_the_systems_mpirun_is_a_note():
    system = beside(Path("/usr/lib/libmpi.so.40.30.4"), "mpirun", Path("/usr/bin/mpirun"))
    assert only(check(with_(mpi={"reached": system}))).level == "note"


def test_ranks_that_run_do_not_care_for_the_mpirun_of_path():
    module = beside(SITE, "mpirun", Path("/opt/openmpi/bin/mpirun"))
    assert only(check(with_(SRUN, mpi={"reached": module}))).level == "ok"


def test_files_of_one_tree_do_not_hide_each_other():
    intel = Path("/opt/intel/mpi/lib/libmpi.so.12.0.0")
    release = Reached(library=intel.parent / "release" / intel.name, by="LD_LIBRARY_PATH")
    assert only(check(with_(mpi={"library": intel, "reached": (release,)}))).level == "ok"


def test_a_module_that_sets_both_paths_is_one_finding():
    both = (
        Reached(library=SITE, by="LD_LIBRARY_PATH"),
        Reached(library=SITE, by="mpirun", program=Path("/opt/openmpi/bin/mpirun")),
    )
    assert only(check(with_(mpi={"reached": both}))).level == "warning"


def tree(root, version="40.30.6"):
    """An MPI as it is installed: a file with links to it, the linker's text, and its mpirun."""
    (root / "lib").mkdir(parents=True)
    (root / "bin").mkdir()
    library = root / "lib" / f"libmpi.so.{version}"
    library.write_bytes(b"")
    (root / "lib" / f"libmpi.so.{version.partition('.')[0]}").symlink_to(library.name)
    (root / "lib" / "libmpi.so").symlink_to(library.name)
    (root / "lib" / "libmpi_mpifh.so.40").write_bytes(b"")
    (root / "bin" / "mpirun").write_text("#!/bin/sh\n")
    (root / "bin" / "mpirun").chmod(0o755)
    return library


def test_a_folder_has_each_mpi_once(tmp_path):
    library = tree(tmp_path)
    assert libraries_in(tmp_path / "lib") == [library]
    (tmp_path / "lib/libmpich.so.12").write_bytes(b"")
    assert set(libraries_in(tmp_path / "lib")) == {library, tmp_path / "lib/libmpich.so.12"}
    assert libraries_in(tmp_path / "none") == []


def test_a_text_for_the_linker_is_no_library(tmp_path):
    (tmp_path / "libmpi.so").write_text("INPUT(libmpi.so.40)")
    assert libraries_in(tmp_path) == []


def test_paths_lead_to_libraries(tmp_path):
    library, other = tree(tmp_path / "a"), tree(tmp_path / "b", "12.2.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").symlink_to(tmp_path / "b/bin/mpirun")
    found = reached({"LD_LIBRARY_PATH": f"/none:{tmp_path}/a/lib:", "PATH": f"{tmp_path}/bin"})
    assert found == (
        Reached(library=library, by="LD_LIBRARY_PATH"),
        Reached(library=other, by="mpirun", program=tmp_path / "bin/mpirun"),
    )
    assert reached({"PATH": "/none"}) == ()
