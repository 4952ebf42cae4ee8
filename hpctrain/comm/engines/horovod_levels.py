"""Two levels by process sets of Horovod: nodes, and the ranks of equal number on all nodes."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpctrain.comm.watch import Watch

if TYPE_CHECKING:
    from hpctrain.comm.engines.horovod_session import Session


class Levels:
    """The process sets of this rank's node and of the ranks of its number on all nodes.

    A sum is formed inside each node, where each rank gets its part of it; the parts are summed
    over the nodes; then the ranks of a node gather them.
    """

    def __init__(self, session: "Session", nodes: Sequence[Sequence[int]]) -> None:
        """Make the process sets. Collective over the world.

        Args:
            session: of all ranks.
            nodes: ranks of each node, as many on every one.
        """
        self._session, self._hvd = session, session.torch
        on_nodes = [sorted(ranks) for ranks in nodes]
        across = [list(ranks) for ranks in zip(*on_nodes, strict=True)]
        self._ranks = [*on_nodes, *across]
        sets = [session.process_set(ranks) for ranks in self._ranks]
        self._node, self._rail = (
            made for made, ranks in zip(sets, self._ranks, strict=True) if session.rank in ranks
        )
        self._local_size = len(on_nodes[0])

    def carries(self, values: Tensor) -> bool:
        """Say whether every rank gets a part of so many values."""
        return values.numel() >= self._local_size

    def allreduce_(self, values: Tensor, name: str, watch: Watch) -> None:
        """Replace flat ``values`` by their sum over all ranks. Collective.

        Args:
            values: of a dtype that Horovod sums.
            name: of this operation.
            watch: looks at the others during waits.
        """
        hvd, node, rail = self._hvd, self._node, self._rail

        def run(start: Any, given: Tensor, step: str, **options: Any) -> Any:
            begin = partial(start, given, name=f"{name}: {step}", **options)
            return self._session.run(begin, watch)

        part = run(hvd.reducescatter_async, values, "node", op=hvd.Sum, process_set=node)
        run(hvd.allreduce_async_, part, "rail", op=hvd.Sum, process_set=rail)
        values.copy_(run(hvd.allgather_async, part, "publish", process_set=node))

    def close(self) -> None:
        """Give the process sets back. Collective over the world."""
        for ranks in self._ranks:
            if self._session.rank in ranks:
                self._session.leave(ranks)
        self._session.collect()
