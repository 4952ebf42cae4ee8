"""Whether this machine can run a private Slurm."""

import os
import shutil
import subprocess
from itertools import chain
from pathlib import Path

ADMINISTRATORS = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where daemons are; users seldom have it on their PATH."""

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
"""What a cluster is made of, and the package that brings it."""

NAMESPACES = ("--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc")
TRIAL = "mount -t tmpfs private /dev/shm; hostname trial"


def search_path() -> str:
    """Return the PATH with the folders of daemons."""
    return f"{os.environ.get('PATH', os.defpath)}:{ADMINISTRATORS}"


def obstacle() -> str:
    """Say what keeps this machine from running a cluster; empty if nothing does."""
    missing = {
        program: package
        for program, package in PROGRAMS.items()
        if shutil.which(program, path=search_path()) is None
    }
    folders = map(Path, ("/usr/lib", "/usr/lib64", "/usr/local/lib"))
    found = chain(*(chain(f.glob("libpmix.so"), f.glob("*-gnu/libpmix.so")) for f in folders))
    if not any(found):  # Slurm opens the file without a version, which only this package brings
        missing["libpmix.so"] = "libpmix-dev"
    if missing:
        packages = " ".join(dict.fromkeys(missing.values()))
        return f"no {', '.join(missing)}: apt-get install {packages}"
    line = ["unshare", *NAMESPACES, "sh", "-ec", TRIAL]
    tried = subprocess.run(line, capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return ""
    reason = " ".join(tried.stderr.split()) or "a command failed"
    return f"no virtual nodes, which take root and CAP_SYS_ADMIN: {reason}"
