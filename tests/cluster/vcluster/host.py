"""Run a host made of kernel namespaces: separate network, name, processes, mounts and IPC.

``/dev/shm`` and ``/var/tmp`` are separate as well. The host shares all other files with the
machine, including ``/tmp``, as on a cluster with a network file system.
"""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.core.python_compat import Self
from tests.cluster.vcluster import cable
from tests.processes import ended

FRAME_BYTES = 16384
"""Largest frame that a host hands to its link: the switch works as fast with few large frames."""

BURST, QUEUE = "32kb", "4mb"  # burst and queue length of a link

DISABLED, FORWARDING = "0", "3"  # states of a port of the switch

NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")

# The first process of a host must reap the orphans of the host, and end with its owner: when the
# pipe to it closes, the kernel ends all processes of the host.
INIT = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    "print('ready', flush=True); sys.stdin.read()"
)

BOOT = """
hostname {name}
mount -t tmpfs shm /dev/shm
mount -t tmpfs private /var/tmp
printf '%s\\n' {table} > /var/tmp/hosts
mount --bind /var/tmp/hosts /etc/hosts
{network}
exec {python} -I -S -c {init}
"""

NETWORK = """
sysctl -qw net.ipv6.conf.all.disable_ipv6=1 || true
sysctl -qw net.ipv4.tcp_retries2={retries}
ip link set lo up
"""

RETRIES = 5
"""A host gives up a peer that has not answered for 13 s, as administrators of clusters set it:
the kernel's own 15 minutes would keep a launcher waiting for a node that is gone."""

END_S = 5.0  # time for the kernel to end the processes of a host


class Host:
    """A running virtual host."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.pid = _innermost(process.pid)  # first process of the host, as this process sees it
        self._process = process
        self._namespace = _namespace(self.pid)

    @classmethod
    def boot(
        cls,
        name: str,
        table: Sequence[str],
        inside: "Host | None" = None,
        *,
        network: bool = True,
    ) -> Self:
        """Start a host.

        Args:
            name: host name.
            table: lines of ``/etc/hosts`` on the host.
            inside: outer host, which sees the processes of this host; the end of the outer host
                also ends this host.
            network: True for a separate network, False for the network of the starting process.

        Raises:
            RuntimeError: the kernel refuses to create the host; the message has the reason.
        """
        script = BOOT.format(
            name=name,
            table=" ".join(map(shlex.quote, table)),
            python=shlex.quote(sys.executable),
            init=shlex.quote(INIT),
            network=NETWORK.format(retries=RETRIES) if network else "",
        )
        own = [name for name in NAMESPACES if network or name != "--net"]
        line = ["unshare", *own, "--fork", "--kill-child", "--mount-proc"]
        line += ["sh", "-ec", script]
        process = subprocess.Popen(
            inside.enter(line) if inside else line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the owner, which ends the host in order
        )
        assert process.stdout is not None
        if (message := process.stdout.readline()) != "ready\n":
            process.kill()
            message += process.communicate()[0]
            raise RuntimeError(f"virtual host {name} does not start: {message.strip()}")
        return cls(name, process)

    @property
    def inner_pid(self) -> int:
        """Process id of the first process of this host, as seen by the outer host."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        views = next(line for line in status.splitlines() if line.startswith("NSpid:"))
        return int(views.split()[-2])

    def enter(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` on this host, in the current directory."""
        return enter(str(self.pid), str(Path.cwd()), argv)

    def do(self, *argv: str, text: str | None = None) -> str:
        """Run a short command on this host and return its output.

        Raises:
            RuntimeError: the command failed; the message has its error output.
        """
        done = ended(self.enter(argv), input=text)
        if done.returncode:
            raise RuntimeError(f"`{shlex.join(argv)}` on {self.name}: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> list[int]:
        """List the process ids of this host, as seen by this process, except the first one."""
        everyone = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return [p for p in everyone if p != self.pid and _namespace(p) == self._namespace]

    def sent_bytes(self) -> int:
        """Return the number of bytes sent on ``eth0``, including link headers."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            card, _, counters = line.partition(":")
            if card.strip() == "eth0":
                return int(counters.split()[8])
        raise RuntimeError(f"host {self.name} has no eth0")

    def end(self) -> None:
        """End the host and every process on it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and `--kill-child` ends the first process
            self._process.wait()
        self._process.stdout.close()


class Link:
    """Join a port of the switch with ``eth0`` of a node."""

    def __init__(self, switch: Host, node: Host, number: int, address: str) -> None:
        self.port = f"port{number}"
        self._switch = switch
        self._node = node
        self._address = address
        self._cable: subprocess.Popen[str] | None = None

    def plug_in(self, rate: str | None, latency_s: float) -> None:
        """Connect node and switch; ``rate`` has the format of ``tc``, None means no limit."""
        far_end = f"{self.port}far"
        if latency_s:
            self._lay_cable(far_end, latency_s)
        else:
            self._switch.do(*f"ip link add {self.port} type veth peer name {far_end}".split())
        target = str(self._node.inner_pid)
        self._switch.do("ip", "link", "set", far_end, "netns", target, "name", "eth0")
        large = ("gso_max_size", str(FRAME_BYTES))
        self._switch.do("ip", "link", "set", self.port, *large, "master", "eth0", "up")
        self._node.do("ip", "link", "set", "eth0", *large, "up")
        self._node.do("ip", "address", "add", self._address, "dev", "eth0")
        if rate:
            self.set_rate(rate)

    def set_rate(self, rate: str) -> None:
        """Set the rate of both directions, such as ``200mbit``, also while programs run."""
        for host, card in ((self._switch, self.port), (self._node, "eth0")):
            shape = ("tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
            host.do("tc", "qdisc", "replace", "dev", card, "root", *shape)

    def silence(self) -> None:
        """Drop every frame; the peers cannot distinguish this from a slow link."""
        self._switch.do("bridge", "link", "set", "dev", self.port, "state", DISABLED)

    def restore(self) -> None:
        """Forward frames again."""
        self._switch.do("bridge", "link", "set", "dev", self.port, "state", FORWARDING)

    def close(self) -> None:
        """Wait for the end of the forwarding process, which the end of the switch has ended."""
        if self._cable is not None:
            assert self._cable.stdout is not None
            self._cable.wait()
            self._cable.stdout.close()

    def _lay_cable(self, far_end: str, latency_s: float) -> None:
        program = [sys.executable, "-I", "-S", str(Path(cable.__file__).absolute())]
        self._cable = subprocess.Popen(
            self._switch.enter([*program, self.port, far_end, str(latency_s)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._cable.stdout is not None
        if (message := self._cable.stdout.readline()) != "ready\n":
            message += self._cable.stdout.read()
            raise RuntimeError(f"no cable with a latency: {message.strip()}")


def enter(pid: str, folder: str, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs ``argv`` in the namespaces of process ``pid``."""
    return ["nsenter", f"--target={pid}", *NAMESPACES, f"--wdns={folder}", "--", *argv]


def _innermost(pid: int) -> int:
    """Return the first process of a host: the last in the chain of children of ``unshare``."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


def _namespace(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0
