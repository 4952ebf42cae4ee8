"""How often training may be taken up again."""

from typing import TYPE_CHECKING

from hpctrain.core.errors import CommError
from hpctrain.core.logs import logger
from hpctrain.horovod.elastic.ending import End, Ending
from hpctrain.runtime import world

if TYPE_CHECKING:
    from hpctrain.horovod.elastic.state import State

MAX_IN_VAIN = 3
"""Failures in a row with no commit between them, after which the same would happen for ever."""


class Resets:
    """Counts how often the training of one state was taken up again."""

    def __init__(self, state: "State") -> None:
        self.number = 0
        self._state = state
        self._in_vain = 0
        self._commits = state.num_commits
        self._limit = world.current().settings.elastic_reset_limit

    def count(self, ending: Ending, cause: Exception | None) -> None:
        """Count one more, and say on rank 0 why.

        Raises:
            CommError: it is one too many; on every rank.
        """
        is_failure = ending.end is End.FAILED
        if self._state.num_commits != self._commits or not is_failure:
            self._in_vain = 0
        self._commits = self._state.num_commits
        self._in_vain += is_failure
        if self._limit is not None and self.number >= self._limit:
            raise CommError(
                f"training may be taken up again {self._limit} times and should be once more: "
                f"{ending.text}; remove the cause or raise HPCTRAIN_ELASTIC_RESET_LIMIT"
            ) from cause
        if self._in_vain > MAX_IN_VAIN:
            raise CommError(
                f"training was taken up again {MAX_IN_VAIN} times from the same commit and failed "
                f"each time, the last time with: {ending.text}; remove the cause, a retry does not"
            ) from cause
        self.number += 1
        if world.rank() == 0:
            how = "from the last commit" if is_failure else "as it stands"
            logger.warning("training is taken up again %s: %s", how, ending.text)
