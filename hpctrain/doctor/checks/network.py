"""The fast network can be used, and is."""

from collections import Counter
from collections.abc import Mapping

from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.check import check, listed, note, ok, plural, warning
from hpctrain.doctor.checks.facts import Carried, Facts, WorldFacts

_FAST_UCX = ("all", "rc", "dc", "ud", "ib")
_SLOW_PROVIDERS = ("tcp", "sockets", "udp")
MOST_OF_IT = 0.5
"""An interface has carried the messages if it counts such a share of them."""
FEWEST_BYTES = 1 << 18
"""Fewer bytes drown in what else leaves a host."""


@check("network cards")
def check_cards(facts: Facts) -> list[Finding]:
    """Name a fast card that is down, that MPI is told not to use, or that it has no driver for."""
    cards = facts.network.cards
    live = [card for card in cards if card.is_live]
    if not cards:
        return [ok("no InfiniBand, Omni-Path or Slingshot: TCP is used")]
    names = ", ".join(card.name for card in live or cards)
    if not live:
        what = f"no port of {names} is active: messages go by TCP"
        return [note(what, "ask the site; `ibstat` shows the ports")]
    if slow := slow_settings(facts.environ):
        what = f"{names} would carry messages, but {{}} makes MPI use TCP"
        return [warning(what.format(each), f"unset {each.partition('=')[0]}") for each in slow]
    slingshot = [card.name for card in live if card.family == "cxi"]
    if slingshot and facts.mpi.is_wheel:
        what = (
            f"{slingshot[0]} is a Slingshot card, and the MPI of a pip package knows none: "
            "messages between nodes go by TCP"
        )
        do = "load the site's MPI module and export MPI4PY_LIBMPI=.../libmpi.so of it"
        return [warning(what, do)]
    return [ok(f"{names} are active")]


def slow_settings(environ: Mapping[str, str]) -> list[str]:
    """Return the variables, with their values, that keep MPI off a fast card."""
    return [
        f"{name}={environ[name]}"
        for name, is_slow in (
            ("OMPI_MCA_pml", lambda words: words == ["ob1"]),
            ("OMPI_MCA_btl", lambda words: "tcp" in words and not environ.get("OMPI_MCA_pml")),
            ("UCX_TLS", _is_slow_ucx),
            ("FI_PROVIDER", lambda words: words[0].partition(";")[0] in _SLOW_PROVIDERS),
            ("I_MPI_OFI_PROVIDER", lambda words: words[0] in _SLOW_PROVIDERS),
            ("I_MPI_FABRICS", lambda words: any("tcp" in word for word in words)),
        )
        if environ.get(name) and is_slow(environ[name].lower().split(","))
    ]


@check("copies between ranks")
def check_copies(facts: Facts) -> list[Finding]:
    """Name what keeps MPI from copying between the ranks of a node in one go."""
    if not facts.network.copy_error:
        return [ok("ranks of a node may read each other's memory")]
    return [
        warning(
            f"process_vm_readv is refused ({facts.network.copy_error}): Open MPI may end with "
            '"Read -1, expected N, errno=1"',
            "export OMPI_MCA_btl_vader_single_copy_mechanism=none (Open MPI 4), "
            "OMPI_MCA_smsc=^cma (Open MPI 5), or docker run --cap-add=SYS_PTRACE",
        )
    ]


@check("network")
def check_ways(world: WorldFacts) -> list[Finding]:
    """Say how messages leave the nodes, and where a fast network lies idle."""
    carried = world.carried
    if len(carried) < 2:
        return [ok("one node: nothing goes over a network")]
    if idle := [node for node in carried if node.fast_cards and _by_tcp(node)]:
        what = (
            f"messages leave {listed([node.host for node in idle])} by {_by_tcp(idle[0])} (TCP), "
            f"while {', '.join(idle[0].fast_cards)} is there and live"
        )
        do = (
            "use an MPI that is built for this network, such as the site's module (hpctrain takes "
            "it by MPI4PY_LIBMPI=/path/to/libmpi.so); with Open MPI and UCX try "
            "OMPI_MCA_pml=ucx, with MPICH FI_PROVIDER=verbs, psm3 or cxi"
        )
        return [warning(what, do)]
    ways = Counter(map(_way, carried))
    told = "; ".join(f"{way} ({plural(number, 'node')})" for way, number in ways.items())
    return [note(f"messages between nodes leave by {told}")]


def _way(node: Carried) -> str:
    if interface := _by_tcp(node):
        return f"{interface}, TCP"
    if card := _main(node.by_card, node.sent_bytes):
        return card
    if node.sent_bytes < FEWEST_BYTES:
        return "an interface that was not found out: too little was sent"
    return "an interface whose counters do not show it"


def _by_tcp(node: Carried) -> str:
    """Return the interface by which the kernel has sent the messages, empty if it has not."""
    return _main(node.by_interface, node.sent_bytes)


def _main(counted: Mapping[str, int], sent_bytes: int) -> str:
    """Return the interface that has carried most of the bytes, empty if none has."""
    if not counted or sent_bytes < FEWEST_BYTES:
        return ""
    name = max(counted, key=lambda name: counted[name])
    return name if sum(counted.values()) >= MOST_OF_IT * sent_bytes else ""


def _is_slow_ucx(words: list[str]) -> bool:
    fast = any(word.lstrip("^\\").startswith(_FAST_UCX) for word in words)
    return not words[0].startswith("^") and not fast and "tcp" in words
