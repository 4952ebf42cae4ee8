"""The link between a node and the switch: a rate, perhaps a latency, and what can go wrong."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.vcluster import cable
from tests.cluster.vcluster.host import Host

FRAME_BYTES = 16384
"""Largest frame that a host hands to its link: the switch works as fast with few large frames."""

BURST, QUEUE = "32kb", "4mb"
"""What may pass at once, and what may wait at either end of a link."""

DISABLED, FORWARDING = "0", "3"
"""States of a port of the switch."""


class Link:
    """A cable from a port of the switch to ``eth0`` of a node."""

    def __init__(self, switch: Host, node: Host, number: int, address: str) -> None:
        self.port = f"port{number}"
        self._switch = switch
        self._node = node
        self._address = address
        self._cable: subprocess.Popen[str] | None = None

    def plug_in(self, rate: str | None, latency_s: float) -> None:
        """Join node and switch; ``rate`` as ``tc`` has it, None for what the machine can do."""
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
        """Set the rate of both directions, such as ``200mbit``; programs may run meanwhile."""
        for host, card in ((self._switch, self.port), (self._node, "eth0")):
            shape = ("tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
            host.do("tc", "qdisc", "replace", "dev", card, "root", *shape)

    def silence(self) -> None:
        """Drop every frame; neither end can tell this from a peer that is merely slow."""
        self._switch.do("bridge", "link", "set", "dev", self.port, "state", DISABLED)

    def restore(self) -> None:
        """Let frames pass again."""
        self._switch.do("bridge", "link", "set", "dev", self.port, "state", FORWARDING)

    def close(self) -> None:
        """Let go of the process that carries the frames; the end of the switch has ended it."""
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
        if (said := self._cable.stdout.readline()) != "ready\n":
            said += self._cable.stdout.read()
            raise RuntimeError(f"no cable with a latency: {said.strip()}")
