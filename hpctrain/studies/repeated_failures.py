"""Detection of failures that would repeat at every further point, so that a study stops."""

import re
from collections.abc import Iterable

from hpctrain.studies.point_records import PointRecord

NUM_SAME = 3  # attempts in a row that fail with the same error

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class RepeatedFailures:
    """Attempts of a study that failed one after the other with the same error.

    An error that is due to the size of a point, such as a lack of memory, affects only this
    point. Other errors, such as a missing file, would make all further attempts fail.
    """

    def __init__(self, known: Iterable[PointRecord]) -> None:
        self._measured = {each.text for each in known if each.is_done}
        self._failed: list[PointRecord] = []

    def stops(self, record: PointRecord) -> bool:
        """Add the next record; return True if the study should stop.

        The study should stop if ``NUM_SAME`` attempts in a row failed with the same error, and
        either no point was ever measured, or all points of these attempts were measured before.
        """
        if record.is_done:
            self._measured.add(record.text)
            self._failed = []
            return False
        if self._failed and not _are_same(self._failed[-1].error, record.error):
            self._failed = []
        self._failed.append(record)
        last = {each.text for each in self._failed[-NUM_SAME:]}
        is_cause = not self._measured or last <= self._measured
        return len(self._failed) >= NUM_SAME and is_cause


def _are_same(one: str | None, other: str | None) -> bool:
    """Return True if two errors have the same first line and share a line of the output.

    Numbers are ignored: they may be ranks, times or addresses.
    """
    (first, *rest), (second, *others) = map(_lines, (one, other))
    shares = not {*rest}.isdisjoint(others)
    return first == second and (shares or not (rest or others))


def _lines(error: str | None) -> list[str]:
    return [_NUMBER.sub("0", line).strip() for line in (error or "").split("\n")]
