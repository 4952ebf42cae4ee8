"""The ranks of a command that works on files, such as ``hpctrain data verify``."""

import math
from dataclasses import replace

from hpctrain.comm.communicator import Communicator
from hpctrain.core.config import Settings, given
from hpctrain.runtime import initialization, world


def join() -> Communicator:
    """Join all ranks of the launch; they wait for each other without a time limit.

    Collective. The ranks do unequal shares of the work, so that one may wait long for another:
    only ``HPCTRAIN_TIMEOUT`` limits these waits. The death of a rank is noticed at once.

    Raises:
        ConfigError: a setting is not valid.
        LaunchError: the launcher, the MPI library and the world do not fit together.
    """
    settings = Settings.from_env()
    if "timeout" not in given():
        settings = replace(settings, timeout=math.inf)
    initialization.join(settings)
    return world.current().comm
