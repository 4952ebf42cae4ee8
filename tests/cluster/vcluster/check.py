"""Whether this machine can be a cluster."""

import shutil
import subprocess

PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
"""What a cluster is built with, and the package that brings it."""

TRIAL = """
ip link add sw type bridge
ip link add pa type veth peer name pb
ip link set pa master sw up
tc qdisc add dev pa root tbf rate 1gbit burst 32kb limit 1mb
ip tuntap add dev tap0 mode tap vnet_hdr
mount -t tmpfs private /dev/shm
"""
"""One of everything, in namespaces that end with the shell."""


def obstacle() -> str:
    """Say what keeps this machine from being a cluster; empty if nothing does."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = dict.fromkeys(PROGRAMS[program] for program in missing)
        return f"no {', '.join(missing)}: apt-get install {' '.join(packages)}"
    line = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc"]
    tried = subprocess.run(
        [*line, "sh", "-ec", TRIAL], capture_output=True, text=True, check=False
    )
    if tried.returncode == 0:
        return ""
    reason = " ".join(tried.stderr.split()) or "a command failed"
    return f"no virtual nodes, which take root, CAP_SYS_ADMIN and CAP_NET_ADMIN: {reason}"
