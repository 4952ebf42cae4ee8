"""The ranks of a command that works on files, such as ``hpctrain data verify``."""

import math
from dataclasses import replace

from hpctrain.comm.communicator import Communicator
from hpctrain.core.config import Settings, given
from hpctrain.runtime import initialization, world


def join() -> Communicator:
    """Join all ranks of the launch. Collective.

    The ranks have unequal shares of the work, so they wait for each other without a time limit
    unless ``HPCTRAIN_TIMEOUT`` is set. The death of a rank is detected at once.

    Raises:
        ConfigError: a setting is not valid.
        LaunchError: the launcher, the MPI library and the world do not match.
    """
    settings = Settings.from_env()
    if "timeout" not in given():
        settings = replace(settings, timeout=math.inf)
    initialization.join(settings)
    return world.current().comm
