"""The way of gradients here: the memory that a node shares, and the plan."""

from collections.abc import Sequence

from hpctrain.cluster import preflight
from hpctrain.comm.factory import Connection
from hpctrain.core.config import Settings
from hpctrain.core.finding import Finding

MEMORY, PLAN = "node memory", "plan"


def check_memory(found: Connection, notes: Sequence[str], settings: Settings) -> list[Finding]:
    """Say which memory the ranks of a node share.

    Args:
        found: of this rank; the plan is the same on every rank.
        notes: of rank 0.
        settings: of rank 0.
    """
    if found.plan.engine == "horovod" and found.topology.size > 1:
        return [Finding(MEMORY, "note", "not used: Horovod moves the tensors")]
    way = found.plan.node_memory
    reason = "; ".join(note for note in notes if note != preflight.core_warning(found.topology))
    if way == "alone":
        return [Finding(MEMORY, "ok", "one rank: nothing to share")]
    if way == "memfd":
        return [Finding(MEMORY, "ok", "the ranks of a node share memory by memfd")]
    if settings.shared_memory in ("off", way):
        what = f"HPCTRAIN_SHARED_MEMORY={settings.shared_memory}: node memory is {way}"
        return [Finding(MEMORY, "note", what)]
    if way == "window":
        return [Finding(MEMORY, "note", reason or "the ranks of a node share an MPI window")]
    return [
        Finding(
            MEMORY,
            "warning",
            reason or "the ranks of a node share no memory: gradients go flat over MPI",
            "run all ranks of a node in one container, or give them one /proc and /dev/shm "
            "(--pid=host --ipc=host), and enough memory",
        )
    ]


def describe(found: Connection) -> list[Finding]:
    """Return the plan as notes: what it says, and what it was chosen by."""
    rows = [f"{name} {text}" for name, text in found.plan.describe()]
    notes = [f"{'; '.join(rows)}; chosen by {found.plan_origin}"]
    for what, where in (("rail", "between nodes"), ("tensors", "over all ranks")):
        table = found.plan.measurements(what)
        for size, *cells in table[1:]:
            pairs = zip(table[0][1:], cells, strict=True)
            times = ", ".join(f"{name} {cell}" for name, cell in pairs if cell)
            notes.append(f"{size} {where}: {times}")
    return [Finding(PLAN, "note", note) for note in notes]
