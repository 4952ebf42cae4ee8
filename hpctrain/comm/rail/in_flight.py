"""Several parts on their way over a rail at the same time.

A rail that reduces one part after the other idles while ranks combine, or wait for each other.
With several under way one part's messages fill what the others leave free.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpctrain.comm.ops import Combination
from hpctrain.comm.rail.algorithms import allreduce_steps, schedule_name
from hpctrain.comm.waiting import BY_MPI, Pace, Watch
from hpctrain.core.python_compat import Self

if TYPE_CHECKING:
    from hpctrain.comm.rail.rail import Rail

DEPTH = 8
"""Parts in flight at once in addition to one that is waited for; less than ``TAGS_PER_CALL``."""


@dataclass(slots=True, eq=False)
class _Reduction:
    """An all-reduce under way."""

    steps: Iterator[Any]
    transfer: Any  # what must be finished before the next step; None when it is over


class InFlight:
    """All-reduces of parts, begun one after the other, each under a tag of its own.

    A context: what it leaves under way is no longer in step with the other ranks.
    """

    def __init__(self, rail: "Rail | None", combination: Combination, watch: Watch) -> None:
        """Take how flat, contiguous parts of dtype ``lane`` are combined.

        Without a rail all parts are empty.
        """
        self._rail, self._watch = rail, watch
        self._combination = combination
        self._under_way: deque[_Reduction] = deque()
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way:  # their messages would meet those of what comes next
            self._watch.fail()

    def reduced(self, parts: Iterable[Tensor]) -> Iterator[None]:
        """Replace ``parts`` by their reductions; yield when the next one, in order, is there.

        The next ``DEPTH`` are begun by then, or all that are left, on every rank alike.
        Collective over the rail.
        """
        for number, part in enumerate(parts):
            self._start(part, number % (DEPTH + 1))
            if len(self._under_way) > DEPTH:
                self._finish_oldest()
                yield
        while self._under_way:
            self._finish_oldest()
            yield

    def pace(self) -> Pace:
        """Return that of the next wait: what is under way needs no haste where it takes long."""
        return BY_MPI.after(time.perf_counter() - self._start_s)

    def poll(self) -> None:
        """Go on with all that is under way as far as that needs no waiting."""
        if self._rail is None:
            return
        is_finished = self._rail.wire.is_finished
        for each in self._under_way:
            while each.transfer is not None and is_finished(each.transfer):
                each.transfer = next(each.steps, None)

    def _start(self, part: Tensor, tag: int) -> None:
        rail = self._rail
        if rail is None or not part.numel():
            self._under_way.append(_Reduction(iter(()), None))
            return
        with rail.timed():
            name = schedule_name(rail.table.at(part.nbytes), part.nbytes)
            steps = allreduce_steps(name, rail.wire, part, self._combination, tag)
            self._under_way.append(_Reduction(steps, next(steps, None)))
            self.poll()

    def _finish_oldest(self) -> None:
        oldest = self._under_way[0]
        if oldest.transfer is not None:
            assert self._rail is not None
            with self._rail.timed():
                while oldest.transfer is not None:
                    self._rail.wire.wait_for(oldest.transfer, self._moves(oldest), self.pace())
        self._under_way.popleft()

    def _moves(self, oldest: _Reduction) -> Callable[[], bool]:
        """Return what goes on with everything, and says whether this one has got anywhere."""
        transfer = oldest.transfer

        def has_moved() -> bool:
            self.poll()
            return oldest.transfer is not transfer

        return has_moved
