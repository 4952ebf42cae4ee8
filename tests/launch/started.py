"""Start programs on ranks in a separate launch, and wait until their processes have ended."""

import subprocess
import sys

from hpctrain.launch import mpiexec
from tests.processes import is_alive, wait_until

RANK = "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')))\n"


def line(tmp_path, code, num_ranks=2):
    """Return the command that runs code on ranks; each rank writes its process id to a file."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        f"{RANK}Path({str(tmp_path)!r}, f'pid-{{rank}}').write_text(str(os.getpid()))\n{code}\n"
    )
    return mpiexec.command([sys.executable, str(script)], num_ranks=num_ranks)


def start(tmp_path, code, **how):
    """Run ``supervise`` in a separate process, so that signals can be sent to it."""
    program = (
        "import sys; from hpctrain.launch import mpiexec; "
        "from hpctrain.launch.supervise import supervise; "
        f"end = supervise({line(tmp_path, code)!r}, environ=mpiexec.environment(), **{how!r}); "
        "sys.exit(end.code)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL)
    wait_for(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
    wait_for(lambda: all(pids(tmp_path)))
    return process


def pids(tmp_path):
    return [int(file.read_text() or 0) for file in sorted(tmp_path.glob("pid-*"))]


def wait_for(condition, limit_s=30.0):
    assert wait_until(condition, limit_s), f"the condition must hold within {limit_s:g} s"


def ranks_are_gone(tmp_path):
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), limit_s=20.0)
    return True
