"""The world of commands whose ranks have unequal amounts of work."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


def joined() -> "Communicator":
    """Join all ranks that were started together, and wait for them as long as they live.

    Collective. A rank that has finished its share waits for the others, for longer than a
    training would: only where ``HPCTRAIN_TIMEOUT`` is set does that wait end. A rank that died
    is noticed at once all the same.

    Raises:
        ConfigError: a setting is not valid.
        LaunchError: the launcher, the MPI library and the world do not fit together.
    """
    from hpctrain.core.config import Settings, given  # noqa: PLC0415
    from hpctrain.runtime import world  # noqa: PLC0415

    settings = Settings.from_env()
    if "timeout" not in given():
        settings = replace(settings, timeout=math.inf)
    world.join(settings)
    return world.current().comm
