"""The order of the steps, with a compiler that only writes a file."""

import io
import tarfile

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.horovod import build as building
from hpctrain.launch.horovod import cache
from hpctrain.launch.horovod.build import Built, build, check_import
from hpctrain.launch.horovod.missing import BuildPlan, Missing
from hpctrain.launch.horovod.sdist import PATCHED, VERSION
from hpctrain.launch.horovod.target import target_of
from hpctrain.launch.horovod.tools import Tools
from tests.launch.horovod.machine import MPI, WHOLE

NAME = f"horovod-{VERSION}-cp311-cp311-linux_x86_64.whl"


class Ears:
    """Remembers what it is told."""

    def __init__(self):
        self.steps, self.lines, self.percents = [], [], []
        self.step, self.say, self.percent = (
            self.steps.append,
            self.lines.append,
            self.percents.append,
        )


class FakeWorkshop:
    """Has the sources, and cannot fetch what the test says."""

    missing = ()

    def __init__(self, folder):
        self.folder = folder

    def fetch(self, _tools, _log):
        with tarfile.open(self.folder / f"horovod-{VERSION}.tar.gz", "w:gz") as file:
            for name in PATCHED:
                text = b"set(CMAKE_CXX_STANDARD 14)\n"
                member = tarfile.TarInfo(f"horovod-{VERSION}/{name}")
                member.size = len(text)
                file.addfile(member, io.BytesIO(text))
        return list(self.missing)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A machine where compiling is quick; ``site.compiled`` counts."""

    class Site:
        compiled = 0
        error = None
        scratch = None
        tools = WHOLE

    def compile_wheel(workshop, _tools, target, jobs, _log, heard):
        Site.scratch, Site.target, Site.jobs = workshop.folder, target, jobs
        heard(50)
        if Site.error is not None:
            raise Site.error
        Site.compiled += 1
        wheel = workshop.folder / NAME
        wheel.write_text(f"wheel {Site.compiled}")
        return wheel

    monkeypatch.setattr(building, "find_mpi", lambda: (Site.tools.mpi, ""))
    monkeypatch.setattr(building, "torch_version", lambda: Site.tools.torch)
    monkeypatch.setattr(building, "look", lambda: Site.tools)
    monkeypatch.setattr(building, "Workshop", FakeWorkshop)
    monkeypatch.setattr(building, "compile_wheel", compile_wheel)
    monkeypatch.setattr(building, "_install", lambda _wheel: None)
    monkeypatch.setattr(building, "check_import", lambda mpi: mpi.library)
    monkeypatch.setattr(building, "launched", lambda: None)
    Site.folder = tmp_path / "wheels" / target_of(WHOLE.torch, MPI).key
    Site.build = staticmethod(
        lambda plan=None, ears=None, **how: build(
            plan or BuildPlan(), ears or Ears(), wheel_dir=tmp_path / "wheels", **how
        )
    )
    return Site


def test_it_tells_what_it_does_and_what_it_changed(site):
    ears = Ears()
    built = site.build(ears=ears)
    assert built == Built(wheel=site.folder / NAME, is_cached=False, library=MPI.library)
    assert ears.steps[-3:] == ["compiling", "installing", "trying it"]
    assert ears.percents == [50]
    assert sum("14) -> set(CMAKE_CXX_STANDARD 20)" in line for line in ears.lines) == 2
    assert any(str(site.folder / cache.LOG) in line for line in ears.lines)
    assert site.jobs == 4


def test_a_wheel_is_built_once(site):
    site.build()
    again = site.build()
    assert (again.is_cached, site.compiled) == (True, 1)
    forced = site.build(force=True)
    assert (forced.is_cached, site.compiled) == (False, 2)
    assert forced.wheel.read_text() == "wheel 2"


def test_another_gpu_or_mpi_is_another_wheel(site, monkeypatch):
    wheels = {site.build().wheel}
    other = building.Mpi(vendor="mpich", version="5.0.2", library=MPI.library)
    monkeypatch.setattr(building, "find_mpi", lambda: (other, ""))
    wheels.add(site.build().wheel)
    assert (len(wheels), site.compiled) == (2, 2)


def test_a_wheel_alone_is_not_installed(site, monkeypatch):
    monkeypatch.setattr(building, "_install", lambda _wheel: pytest.fail("installed"))
    assert site.build(BuildPlan(install=False)).library is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), LaunchError("no")])
def test_an_interrupted_build_leaves_its_log_and_no_wheel(site, error):
    site.error = error
    with pytest.raises(type(error)):
        site.build()
    assert cache.wheel_in(site.folder) is None
    assert sorted(path.name for path in site.folder.iterdir()) == [cache.LOG, "lock"]
    assert not site.scratch.exists()
    site.error = None
    assert not site.build().is_cached


def test_what_is_missing_and_what_cannot_be_fetched_is_said_together(site, monkeypatch):
    site.tools = Tools(torch="2.13.0", mpi=MPI, disk_bytes=1 << 40)
    monkeypatch.setattr(FakeWorkshop, "missing", (Missing("pip fetches: offline", "go online"),))
    with pytest.raises(LaunchError) as caught:
        site.build()
    for text in ("apt-get install g++", "has its mpicxx", "pip fetches: offline", "go online"):
        assert text in str(caught.value)
    assert site.compiled == 0


def test_without_mpi_or_torch_nothing_is_begun(site, tmp_path):
    site.tools = Tools(torch="", mpi_error="no MPI; get one", disk_bytes=1 << 40)
    with pytest.raises(LaunchError, match="no MPI"):
        site.build()
    assert not (tmp_path / "wheels").exists()


def test_ranks_of_a_job_do_not_build(site, monkeypatch):
    class Launched:
        rank, size = 1, 4

    monkeypatch.setattr(building, "launched", Launched)
    with pytest.raises(LaunchError, match=r"rank 1 of 4.*without a launcher"):
        site.build()


def test_a_folder_of_wheels_may_be_read_only(site, monkeypatch):
    site.build()
    monkeypatch.setattr(building.os, "access", lambda _path, _mode: False)
    monkeypatch.setattr(building.cache, "locked", lambda *_: pytest.fail("locked"))
    assert site.build().is_cached


@pytest.mark.requires("horovod")
@pytest.mark.limit(240)
def test_the_installed_package_is_tried_in_a_process_of_its_own():
    mpi, _ = building.find_mpi()
    assert check_import(mpi) == mpi.library
    with pytest.raises(LaunchError, match=r"must use the MPI library that ranks load, /opt/mpi"):
        check_import(MPI)
