"""Check whether this machine can simulate a cluster."""

import os
import shutil
from collections.abc import Mapping, Sequence
from glob import glob

from tests.processes import ended

PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
"""What a cluster is built with, and the package that brings it."""

SLURM_PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}

NAMESPACES = ("--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc")
MOUNT = "mount -t tmpfs private /dev/shm; hostname trial"
TRIAL = f"""
ip link add sw type bridge
ip link add pa type veth peer name pb
ip link set pa master sw up
tc qdisc add dev pa root tbf rate 1gbit burst 32kb limit 1mb
ip tuntap add dev tap0 mode tap vnet_hdr
{MOUNT}
"""
"""One of everything, in namespaces that end with the shell."""


def search_path() -> str:
    """Return the PATH with the folders of daemons, which users often lack."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def obstacle() -> str:
    """Return the reason why this machine cannot simulate a cluster, or an empty string."""
    rights = "root, CAP_SYS_ADMIN and CAP_NET_ADMIN"
    return _missing(PROGRAMS) or _refused(("--net", *NAMESPACES), TRIAL, rights)


def slurm_obstacle() -> str:
    """Return the reason why this machine cannot run a private Slurm, or an empty string."""
    # Slurm opens the file without a version, which only this package contains.
    files = ("/usr/lib*/libpmix.so", "/usr/lib/*-gnu/libpmix.so", "/usr/local/lib/libpmix.so")
    return _missing(SLURM_PROGRAMS, files=files) or _refused(
        NAMESPACES, MOUNT, "root and CAP_SYS_ADMIN"
    )


def _missing(programs: Mapping[str, str], files: Sequence[str] = ()) -> str:
    path = search_path()
    missing = {name: each for name, each in programs.items() if not shutil.which(name, path=path)}
    if files and not any(map(glob, files)):
        missing["libpmix.so"] = "libpmix-dev"
    if not missing:
        return ""
    packages = " ".join(dict.fromkeys(missing.values()))
    return f"no {', '.join(missing)}: apt-get install {packages}"


def _refused(namespaces: Sequence[str], trial: str, rights: str) -> str:
    line = ["unshare", *namespaces, "sh", "-ec", trial]
    tried = ended(line)
    if tried.returncode == 0:
        return ""
    reason = " ".join(tried.stderr.split()) or "a command failed"
    return f"no virtual nodes, which take {rights}: {reason}"
