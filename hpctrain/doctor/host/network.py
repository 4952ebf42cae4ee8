"""Check of the network: the fast one can be used, and is."""

from collections.abc import Mapping

from hpctrain.core.finding import Finding
from hpctrain.core.units import format_bytes
from hpctrain.doctor.host.facts import Card, Facts

CHECK = "network cards"
MEMLOCK = "locked memory"
FORK = "fork safety"
COPY = "copies between ranks"

_FORK_SAFE_SINCE = (5, 12)
"""Linux copies pages that a card has registered into a child, instead of taking them away."""
_FORK_VARIABLES = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE")
_FAST_UCX = ("all", "rc", "dc", "ud", "ib")
_SLOW_PROVIDERS = ("tcp", "sockets", "udp")


def check(facts: Facts) -> list[Finding]:
    """Name a fast card that is down, or that the environment tells MPI not to use."""
    live = [card for card in facts.network.cards if card.is_live]
    if not facts.network.cards:
        return [Finding(CHECK, "ok", "no InfiniBand, Omni-Path or Slingshot: TCP is used")]
    names = ", ".join(card.name for card in facts.network.cards)
    if not live:
        what = f"no port of {names} is active: messages go by TCP"
        return [Finding(CHECK, "note", what, "ask the site; `ibstat` shows the ports")]
    names = ", ".join(card.name for card in live)
    found = [
        Finding(
            CHECK,
            "warning",
            f"{names} would carry messages, but {setting} makes MPI use TCP",
            f"unset {setting.partition('=')[0]}",
        )
        for setting in slow_settings(facts.environ)
    ]
    return found or _wheel(facts, live) or [Finding(CHECK, "ok", f"{names} are active")]


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


def check_memlock(facts: Facts) -> list[Finding]:
    """Name a limit that keeps an InfiniBand card from its memory."""
    limit = facts.network.memlock_bytes
    cards = _infiniband(facts)
    text = "unlimited" if limit is None else format_bytes(limit)
    if limit is None or not cards:
        return [Finding(MEMLOCK, "ok", text if cards else f"{text}, no card needs it")]
    return [
        Finding(
            MEMLOCK,
            "warning",
            f"a process may lock {text}, and {cards[0]} reads and writes locked memory only",
            "`ulimit -l unlimited` in /etc/security/limits.conf and in slurmd's unit "
            "(LimitMEMLOCK=infinity), and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
        )
    ]


def check_fork(facts: Facts) -> list[Finding]:
    """Name a kernel on which a child process takes registered memory away from its parent."""
    cards = _infiniband(facts)
    kernel = facts.network.kernel
    if not cards or not kernel or kernel >= _FORK_SAFE_SINCE:
        return [Finding(FORK, "ok", "child processes do no harm to messages")]
    if any(facts.environ.get(name, "0") not in ("", "0") for name in _FORK_VARIABLES):
        return [Finding(FORK, "ok", "child processes are provided for by the environment")]
    return [
        Finding(
            FORK,
            "warning",
            f"Linux {'.'.join(map(str, kernel))} with {cards[0]}: a program that forks, such as "
            "a data loader of torch, may send wrong bytes afterwards",
            "export RDMAV_FORK_SAFE=1; loaders of hpctrain do not fork the rank",
        )
    ]


def check_copies(facts: Facts) -> list[Finding]:
    """Name what keeps MPI from copying between the ranks of a node in one go."""
    if not facts.network.copy_error:
        return [Finding(COPY, "ok", "ranks of a node may read each other's memory")]
    return [
        Finding(
            COPY,
            "warning",
            f"process_vm_readv is refused ({facts.network.copy_error}): Open MPI may end with "
            '"Read -1, expected N, errno=1"',
            "export OMPI_MCA_btl_vader_single_copy_mechanism=none (Open MPI 4), "
            "OMPI_MCA_smsc=^cma (Open MPI 5), or docker run --cap-add=SYS_PTRACE",
        )
    ]


def _infiniband(facts: Facts) -> list[str]:
    cards = facts.network.cards
    return [card.name for card in cards if card.family == "infiniband" and card.is_live]


def _is_slow_ucx(words: list[str]) -> bool:
    fast = any(word.lstrip("^\\").startswith(_FAST_UCX) for word in words)
    return not words[0].startswith("^") and not fast and "tcp" in words


def _wheel(facts: Facts, live: list[Card]) -> list[Finding]:
    """Name a card that the MPI of a pip package has no driver for."""
    cards = [card.name for card in live if card.family == "cxi"]
    if not cards or not facts.mpi.is_wheel:
        return []
    return [
        Finding(
            CHECK,
            "warning",
            f"{cards[0]} is a Slingshot card, and the MPI of a pip package knows none: messages "
            "between nodes go by TCP",
            "load the site's MPI module and export MPI4PY_LIBMPI=.../libmpi.so of it",
        )
    ]
