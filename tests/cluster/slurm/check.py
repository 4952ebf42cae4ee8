"""Whether this machine can run a private Slurm."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster.slurm.mode import Mode
from tests.cluster.vcluster import check as network

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

ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server-core"}
"""What ``sacct`` needs besides."""

PACKAGES = ("slurm-wlm", "munge", "libpmix-dev")

TRIAL = "mount -t tmpfs private /dev/shm; hostname trial"
NAMESPACES = ("--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc")


def search_path() -> str:
    """Return the PATH with the folders of daemons."""
    return f"{os.environ.get('PATH', os.defpath)}:{ADMINISTRATORS}"


def obstacle(mode: Mode = "uts", *, accounting: bool = False) -> str:
    """Say what keeps this machine from running a cluster of this mode; empty if nothing does."""
    programs = PROGRAMS | (ACCOUNTING if accounting else {})
    missing = {
        program: package
        for program, package in programs.items()
        if shutil.which(program, path=search_path()) is None
    }
    if not _has_pmix():  # Slurm opens the file without a version, which only this package brings
        missing["libpmix.so"] = "libpmix-dev"
    if missing:
        packages = " ".join(dict.fromkeys(missing.values()))
        return f"no {', '.join(missing)}: apt-get install {packages}"
    if mode == "net":
        return network.obstacle()
    if mode == "uts":
        return _namespaces()
    return ""


def _has_pmix() -> bool:
    folders = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))
    return any(
        found for folder in folders for found in (*folder.glob("libpmix.so"), *_multiarch(folder))
    )


def _multiarch(folder: Path) -> list[Path]:
    return list(folder.glob("*-linux-gnu/libpmix.so"))


def _namespaces() -> str:
    line = ["unshare", *NAMESPACES, "sh", "-ec", TRIAL]
    tried = subprocess.run(line, capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return ""
    reason = " ".join(tried.stderr.split()) or "a command failed"
    return f"no virtual nodes, which take root and CAP_SYS_ADMIN: {reason}"
