"""The timeline that is being recorded, if there is one."""

import atexit
import logging
from pathlib import Path

from hpctrain.negotiation.timeline.timeline import Timeline

RANK = "{rank}"
"""Where a path has this, every rank writes a file of its own."""

_LOG = logging.getLogger(__name__)


class Timelines:
    """Begins and ends timelines of this rank, one at a time. Not collective."""

    def __init__(self, rank: int, size: int) -> None:
        self.current: Timeline | None = None
        """What to record in; to be asked for again for every operation."""
        self._rank, self._size = rank, size

    def start(self, path: str | Path, *, mark_cycles: bool = False) -> None:
        """Record from now on; another timeline ends, the same one goes on.

        Args:
            path: the file. Rank 0 alone records, unless it has ``{rank}``, for which the number
                of each rank is put in. A file that cannot be made is a warning.
            mark_cycles: whether to mark each round of the controller.
        """
        if RANK not in str(path) and self._rank != 0:
            return
        path = Path(str(path).replace(RANK, str(self._rank)))
        if self.current is not None and self.current.path == path:
            return
        self.stop()
        try:
            self.current = Timeline(path, self._rank, self._size, mark_cycles=mark_cycles)
        except OSError as error:
            _LOG.warning("there will be no timeline: %s; name a file that can be made", error)
            return
        atexit.register(self.stop)

    def stop(self) -> None:
        """Write what there is and end the timeline. Harmless without one."""
        ending, self.current = self.current, None
        if ending is not None:
            atexit.unregister(self.stop)
            ending.close()
