"""Interfaces that carry messages between nodes: the kernel's counters before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.nics import live_cards
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_bytes

CHECK = "network"

COUNTED = Path("/proc/net/dev")
_WORD_BYTES = 4
"""InfiniBand counts words."""
MOST_OF_IT = 0.5
"""An interface has carried the messages if it counts such a share of them."""
FEWEST_BYTES = 1 << 18
"""Fewer bytes drown in what else leaves a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What left one host while messages were measured."""

    host: str
    sent_bytes: int
    """To other nodes, in messages of this program, about."""
    by_interface: Mapping[str, int]
    """Bytes by name: Ethernet and other interfaces of the kernel."""
    by_card: Mapping[str, int]
    """Bytes by name: InfiniBand and its kin, past the kernel."""
    fast_cards: tuple[str, ...] = ()
    """Those of the host, whether they count or not."""


def fast_cards() -> tuple[str, ...]:
    """Name the live InfiniBand and Slingshot cards; not those that speak Ethernet (RoCE)."""
    return tuple(card.name for card in live_cards() if not _speaks_ethernet(card))


def interface_bytes(table: Path = COUNTED) -> dict[str, int]:
    """Return the bytes that left by each interface of this network namespace so far."""
    try:
        lines = table.read_text().splitlines()[2:]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {name.strip(): int(counters.split()[8]) for name, counters in pairs}


def card_bytes() -> dict[str, int]:
    """Return the bytes that left by each fast card so far."""
    found: dict[str, int] = {}
    for card in live_cards():
        for file in card.glob("ports/*/counters/port_xmit_data"):
            try:
                words = int(file.read_text())
            except (OSError, ValueError):
                continue
            found[card.name] = found.get(card.name, 0) + words * _WORD_BYTES
    return found


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return what the counters grew by, without those that stood still."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value > 0}


def check(carried: Sequence[Carried]) -> list[Finding]:
    """Say how messages leave the nodes, and where a fast network lies idle.

    Args:
        carried: one for each node.
    """
    if len(carried) < 2:
        return [Finding(CHECK, "ok", "one node: nothing goes over a network")]
    idle = [node for node in carried if node.fast_cards and _by_tcp(node)]
    if idle:
        names = ", ".join(node.host for node in idle[:4])
        names += f" and {len(idle) - 4} more" if len(idle) > 4 else ""
        return [
            Finding(
                CHECK,
                "warning",
                f"messages leave {names} by {_by_tcp(idle[0])} (TCP), while "
                f"{', '.join(idle[0].fast_cards)} is there and live",
                "use an MPI that is built for this network, such as the site's module (hpctrain "
                "takes it by MPI4PY_LIBMPI=/path/to/libmpi.so); with Open MPI and UCX try "
                "OMPI_MCA_pml=ucx, with MPICH FI_PROVIDER=verbs, psm3 or cxi",
            )
        ]
    ways: dict[str, int] = {}
    for node in carried:
        way = _way(node)
        ways[way] = ways.get(way, 0) + 1
    told = "; ".join(f"{way} ({num} node{'s' * (num > 1)})" for way, num in ways.items())
    return [Finding(CHECK, "note", f"messages between nodes leave by {told}")]


def _way(node: Carried) -> str:
    if interface := _by_tcp(node):
        return f"{interface}, TCP"
    if card := _main(node.by_card, node.sent_bytes):
        return card
    if node.sent_bytes < FEWEST_BYTES:
        return "an interface that was not found out: too little was sent"
    return "an interface whose counters do not show it"


def _by_tcp(node: Carried) -> str:
    return _main(node.by_interface, node.sent_bytes)


def _main(counted: Mapping[str, int], sent_bytes: int) -> str:
    """Return the interface that has carried most of the bytes, empty if none has."""
    if not counted or sent_bytes < FEWEST_BYTES:
        return ""
    name = max(counted, key=lambda name: counted[name])
    total = sum(counted.values())
    return name if total >= MOST_OF_IT * sent_bytes else ""


def _speaks_ethernet(card: Path) -> bool:
    layers = [file.read_text().strip() for file in card.glob("ports/*/link_layer")]
    return bool(layers) and all(layer == "Ethernet" for layer in layers)


def format_rate(bytes_per_s: float) -> str:
    """Write a bandwidth: ``117.3 MiB/s``."""
    return f"{format_bytes(bytes_per_s)}/s"
