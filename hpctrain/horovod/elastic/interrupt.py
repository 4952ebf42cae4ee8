"""Hosts have come or are about to go: training stops at a commit and is taken up again."""

import enum

from hpctrain.core.errors import HpctrainError


class HostUpdate(enum.IntFlag):
    """What has happened to the hosts of a job."""

    NONE = 0
    REMOVED = 1
    ADDED = 2


class HostsUpdatedInterrupt(HpctrainError, RuntimeError):  # noqa: N818 - Horovod's name
    """The hosts of the job change; ``elastic.run`` takes training up again, nothing is lost."""

    def __init__(self, skip_sync: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's
        """Say whether the ranks that stay hold the same state already: hosts only leave."""
        super().__init__(
            "the hosts of this job change; let hpctrain.elastic.run call the function that commits"
        )
        self.skip_sync = skip_sync
