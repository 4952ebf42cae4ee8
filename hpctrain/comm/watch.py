"""Watch of a waiting rank, every tenth of a second: nobody waits in silence or for ever."""

import logging
import math
from collections.abc import Callable, Collection, Mapping

from hpctrain.core.errors import RankLostError

LATE_S = 3.0
"""A rank that waits for another node for so long says so, once for each rank it waits for."""

FindLost = Callable[[Collection[int] | None], None]
"""Raises ``RankLostError`` if one of these ranks is lost, for None any; see ``Presence.check``."""

_LOG = logging.getLogger(__name__)


def _nobody_is_lost(ranks: Collection[int] | None) -> None:
    """Look for nobody: what communicators without a world do."""


class Watch:
    """Looks for lost ranks, names those that are late, and ends a wait that lasts too long.

    Ranks are those of the world. All waiting loops of a communicator share one watch.
    """

    def __init__(
        self,
        find_lost: FindLost = _nobody_is_lost,
        *,
        hosts: Mapping[int, str] | None = None,
        rank: int = 0,
        timeout_s: float = math.inf,
        ranks: Collection[int] | None = None,
    ) -> None:
        """Take what is needed to tell who is waited for.

        Args:
            find_lost: raises if a rank that is waited for is lost.
            hosts: name of the node of every rank.
            rank: of this process.
            timeout_s: longest wait.
            ranks: those that are waited for where nobody says more; None for all of the world.
        """
        self.waited_s = 0.0
        """Seconds that this process has waited so far."""
        self._find_lost = find_lost
        self._hosts = hosts or {}
        self._rank = rank
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._named: set[int] = set()

    def of_group(self, ranks: Collection[int]) -> "Watch":
        """Return a watch over some ranks of the world: that others leave does not concern it."""
        return Watch(
            self._find_lost,
            hosts=self._hosts,
            rank=self._rank,
            timeout_s=self._timeout_s,
            ranks=ranks,
        )

    def look(self, waited_s: float, partner: int | None = None, over: str = "") -> None:
        """Return if there is reason to wait on; cheap enough for every turn of a waiting loop.

        Args:
            waited_s: how long this wait has lasted.
            partner: the rank that is waited for, None for all.
            over: the link that is waited on, such as ``rail 0``; empty inside a node.

        Raises:
            RankLostError: a rank is lost, or the wait has lasted too long.
        """
        self._find_lost(self._ranks if partner is None else (partner,))
        if waited_s > self._timeout_s:
            raise RankLostError(
                f"{self._who(waited_s, partner, over)}, longer than HPCTRAIN_TIMEOUT="
                f"{self._timeout_s:g} allows; see what that rank does and whether the link works, "
                f"or set HPCTRAIN_TIMEOUT to more seconds"
            )
        if partner is not None and over and waited_s > LATE_S and partner not in self._named:
            self._named.add(partner)
            _LOG.warning(
                "%s; it is busy with something else, or the link is silent",
                self._who(waited_s, partner, over),
            )

    def _who(self, waited_s: float, partner: int | None, over: str) -> str:
        me = self._name(self._rank)
        whom = "the other ranks" if partner is None else self._name(partner)
        return f"{me} has waited {waited_s:.0f} s for {whom}{' over ' if over else ''}{over}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"
