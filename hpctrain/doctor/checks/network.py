"""Checks of the network: use of fast adapters, speed of links, clocks of nodes."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from hpctrain.cluster.env import COPIES_OFF, tuning
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_bytes, format_seconds, plural
from hpctrain.doctor.checks.check import Found, few, listed, note, ok, warning
from hpctrain.doctor.checks.facts import Carried, Facts, MeasuredLink, WorldFacts

_FAST_UCX = ("all", "rc", "dc", "ud", "ib")
_SLOW_PROVIDERS = ("tcp", "sockets", "udp")
MOST_OF_IT = 0.5  # interfaces sent the messages if they counted this fraction of the sent bytes
FEWEST_BYTES = 1 << 18  # fewer bytes cannot be distinguished from other traffic of the host


def check_adapters(facts: Facts) -> Found:
    """Report a fast adapter that is down, disabled by a variable, or unknown to MPI."""
    adapters = facts.network.adapters
    live = [adapter for adapter in adapters if adapter.is_live]
    if not adapters:
        return ok("no InfiniBand, Omni-Path or Slingshot: TCP is used")
    names = ", ".join(adapter.name for adapter in live or adapters)
    if not live:
        what = f"an adapter must have an active port, but {names} has none: messages use TCP"
        return note(what, "report this to the site; `ibstat` shows the ports")
    if slow := slow_settings(facts.environ):
        what = f"MPI must be free to use {names}, but {{}} makes MPI use TCP"
        return [warning(what.format(each), f"unset {each.partition('=')[0]}") for each in slow]
    slingshot = [adapter.name for adapter in live if adapter.family == "cxi"]
    if slingshot and facts.mpi.is_wheel:
        what = (
            f"MPI must support the Slingshot adapter {slingshot[0]}, but this MPI is a Python "
            "package, which does not: messages between nodes use TCP"
        )
        do = "load the MPI module of the site, and export MPI4PY_LIBMPI=.../libmpi.so of that MPI"
        return warning(what, do)
    return ok(f"{names} are active")


def slow_settings(environ: Mapping[str, str]) -> list[str]:
    """Return the variables, with their values, that disable fast adapters in MPI."""
    pml = tuning(environ).get("OMPI_MCA_pml")
    return [
        f"{name}={environ[name]}"
        for name, is_slow in (
            ("OMPI_MCA_pml", lambda words: words == ["ob1"]),
            ("OMPI_MCA_btl", lambda words: "tcp" in words and not pml),
            ("UCX_TLS", _is_slow_ucx),
            ("FI_PROVIDER", lambda words: words[0].partition(";")[0] in _SLOW_PROVIDERS),
            ("I_MPI_OFI_PROVIDER", lambda words: words[0] in _SLOW_PROVIDERS),
            ("I_MPI_FABRICS", lambda words: any("tcp" in word for word in words)),
        )
        if environ.get(name) and is_slow(environ[name].lower().split(","))
    ]


def check_copies(facts: Facts) -> Found:
    """Report whether MPI can copy memory between processes by ``process_vm_readv``."""
    if not facts.network.copy_error:
        return ok("ranks of a node may read the memory of each other")
    return warning(
        "the kernel must permit process_vm_readv, but refuses it "
        f"({facts.network.copy_error}): messages between ranks of a node are copied twice, and "
        "MPI programs without hpctrain may fail",
        "docker run --cap-add=SYS_PTRACE, or for programs without hpctrain "
        + " and ".join(f"export {name}={value}" for name, value in COPIES_OFF.items()),
    )


def check_interfaces(world: WorldFacts) -> Found:
    """Report the interfaces that send messages between nodes, and unused fast networks."""
    carried = world.traffic.carried
    if len(carried) < 2:
        return ok("one node: no messages over a network")
    if idle := [node for node in carried if node.fast_adapters and _by_tcp(node)]:
        what = (
            f"messages must use the fast adapters, but leave "
            f"{listed([node.host for node in idle])} by {_by_tcp(idle[0])} (TCP), although "
            f"{', '.join(idle[0].fast_adapters)} is active"
        )
        do = (
            "use an MPI that is built for this network, such as the site's module (hpctrain loads "
            "it by MPI4PY_LIBMPI=/path/to/libmpi.so); with Open MPI and UCX try "
            "OMPI_MCA_pml=ucx, with MPICH FI_PROVIDER=verbs, psm3 or cxi"
        )
        return warning(what, do)
    interfaces = Counter(map(_interface, carried))
    text = "; ".join(f"{name} ({plural(number, 'node')})" for name, number in interfaces.items())
    return note(f"messages between nodes leave by {text}")


def _interface(node: Carried) -> str:
    if interface := _by_tcp(node):
        return f"{interface}, TCP"
    if adapter := _main(node.by_adapter, node.sent_bytes):
        return adapter
    if node.sent_bytes < FEWEST_BYTES:
        return "an unknown interface: too few bytes were sent"
    return "an interface without matching counters"


def _by_tcp(node: Carried) -> str:
    """Return the kernel interface that sent most of the bytes, by TCP; empty if none did."""
    return _main(node.by_interface, node.sent_bytes)


def _main(counted: Mapping[str, int], sent_bytes: int) -> str:
    """Return the interface that sent most bytes; empty if the interfaces sent too few bytes."""
    if not counted or sent_bytes < FEWEST_BYTES:
        return ""
    name = max(counted, key=lambda name: counted[name])
    return name if sum(counted.values()) >= MOST_OF_IT * sent_bytes else ""


def _is_slow_ucx(words: list[str]) -> bool:
    fast = any(word.lstrip("^\\").startswith(_FAST_UCX) for word in words)
    return not words[0].startswith("^") and not fast and "tcp" in words


SLOWER = 3.0
"""A link is slow if its bandwidth is below the usual bandwidth divided by this number.

The bandwidths of healthy links differ by up to a factor of two.
"""
LATER, LATER_S = 4.0, 300e-6
"""A link is slow if its latency exceeds the usual latency by both this factor and this time."""
SLOWEST_BYTES_PER_S, LONGEST_S = 12e6, 5e-3
"""A link between nodes is also slow if its bandwidth is below, or its latency above, these limits.

For comparison, gigabit Ethernet has 118e6 bytes/s.
"""
WRONG_S = 1.0  # larger differences are reported; NTP synchronizes clocks within milliseconds


def check_links(world: WorldFacts) -> list[Finding]:
    """Report the speed of messages inside and between nodes, and the slow links."""
    found = []
    if world.traffic.inside:
        found.append(note(f"inside a node: {_spreads(world.traffic.inside)}"))
    if world.traffic.between:
        pairs = plural(len(world.traffic.between), "pair")
        found.append(note(f"between nodes: {_spreads(world.traffic.between)}, by {pairs}"))
        found += _slow_links(slow(world.traffic.between), world)
    return found


def slow(links: Sequence[MeasuredLink]) -> list[MeasuredLink]:
    """Return the links that are much slower than usual, or slower than absolute limits.

    The usual speed is the median over nodes of the best link of each node. A median over links
    would be wrong if one of three nodes is bad, because two of the three links are then bad.
    """
    return [link for link in links if _is_slow(link, *_usual(links))]


def _slow_links(bad: Sequence[MeasuredLink], world: WorldFacts) -> list[Finding]:
    """Return a finding for each node whose links are all slow, and for each other slow link."""
    if not bad:
        return []
    links, host_of = world.traffic.between, world.host_of
    mine = {r: [link for link in links if r in link.ranks] for r in sorted(host_of)}
    slow_ranks = [
        rank
        for rank, own in mine.items()
        if len(own) > 1 and all(link in bad for link in own) and len(bad) < len(links)
    ]
    latency_s, bytes_per_s = _usual(links)
    usual = f"usual here is {format_seconds(latency_s)}, {_rate(bytes_per_s)}"
    look = "ask the site to check cable, switch port and adapter"
    nodes = [
        warning(
            f"slow link: {host_of[rank]} reaches all other nodes with only "
            f"{_figures(mine[rank])}; {usual}",
            f"{look}; until then exclude the node: sbatch --exclude={host_of[rank]}",
        )
        for rank in slow_ranks
    ]
    compared = usual if len(links) > 1 else "a gigabit carries 112 MiB/s"
    pairs = [
        warning(
            f"slow link: between {' and '.join(host_of[rank] for rank in link.ranks)} with "
            f"{_figures([link])}; {compared}",
            "see the finding network: messages may use the wrong interface; if they use the right "
            f"interface, {look}",
        )
        for link in bad
        if not set(slow_ranks) & set(link.ranks)
    ]
    return [*few(nodes), *few(pairs)]


def _usual(links: Sequence[MeasuredLink]) -> tuple[float, float]:
    """Return the usual latency and bandwidth: the median over nodes of each node's best link."""
    nodes = {rank for link in links for rank in link.ranks}
    own = [[link for link in links if rank in link.ranks] for rank in nodes]
    return (
        median(min(link.latency_s for link in found) for found in own),
        median(max(link.bytes_per_s for link in found) for found in own),
    )


def _is_slow(link: MeasuredLink, latency_s: float, bytes_per_s: float) -> bool:
    late = link.latency_s > max(LATER * latency_s, latency_s + LATER_S)
    return (
        late
        or link.latency_s > LONGEST_S
        or link.bytes_per_s < max(bytes_per_s / SLOWER, SLOWEST_BYTES_PER_S)
    )


def _figures(links: Sequence[MeasuredLink]) -> str:
    latency_s = min(link.latency_s for link in links)
    return f"{format_seconds(latency_s)}, {_rate(max(link.bytes_per_s for link in links))}"


def _spreads(links: Sequence[MeasuredLink]) -> str:
    latency = _spread((link.latency_s for link in links), format_seconds)
    return f"{latency} latency, {_spread((link.bytes_per_s for link in links), _rate)}"


def _spread(values: Iterable[float], text: Callable[[float], str]) -> str:
    ordered = sorted(values)
    return " to ".join(dict.fromkeys((text(ordered[0]), text(ordered[-1]))))


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


def check_clocks(world: WorldFacts) -> Found:
    """Report nodes whose clocks differ from the median clock."""
    if world.topology.num_nodes == 1:
        return ok("one node, one clock")
    found = offsets(world.traffic.between, world.topology.nodes[0][0])
    middle = sorted(ahead for ahead, _ in found.values())[(len(found) - 1) // 2]
    wrong = [
        f"{world.host_of[rank]} is {format_seconds(abs(ahead - middle))} "
        f"{'ahead' if ahead > middle else 'behind'} (within {format_seconds(error_s)})"
        for rank, (ahead, error_s) in sorted(found.items())
        if abs(ahead - middle) - error_s > WRONG_S
    ]
    if wrong:
        what = f"clocks of nodes must agree within {WRONG_S:g} s, but {listed(wrong)}"
        do = (
            "synchronize the clocks with chrony or ntpd (chronyc tracking shows the state); until "
            "then, times in logs, ages of files and the end of a job are wrong"
        )
        return warning(what, do)
    most = max(abs(ahead - middle) for ahead, _ in found.values())
    error_s = max(error_s for _, error_s in found.values())
    return ok(
        f"the clocks of {len(found)} nodes differ by {format_seconds(most)} at most "
        f"(estimated within {format_seconds(error_s)})"
    )


def offsets(links: Sequence[MeasuredLink], root: int) -> dict[int, tuple[float, float]]:
    """Return, for each rank, its clock minus the clock of ``root``, and a bound of the error.

    Both are in seconds. If no link between a rank and ``root`` was measured, the clock differences
    along a path of measured links are added. Ranks without a path to ``root`` are omitted.
    """
    found = {root: (0.0, 0.0)}
    edge = [root]
    while edge:
        here = edge.pop(0)
        for link in links:
            if here not in link.ranks:
                continue
            first, second = link.ranks
            other, sign = (second, 1) if here == first else (first, -1)
            if other not in found:
                ahead, error_s = found[here]
                found[other] = (ahead + sign * link.clock_s, error_s + link.clock_error_s)
                edge.append(other)
    return found
