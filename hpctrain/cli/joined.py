"""The world of commands whose ranks have unequal amounts of work."""

import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.core.errors import DataError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextmanager
def ranks() -> "Iterator[Communicator | None]":
    """Join the ranks that were started together; None for a process alone, which loads no MPI.

    Raises:
        MismatchError: a DataError left the block, on all ranks: one of them tells it, and no
            rank ends the others.
    """
    from hpctrain.cluster.env import launched  # noqa: PLC0415

    found = launched()
    if found is None or found.size == 1:
        yield None
        return
    comm = joined()
    try:
        yield comm
    except DataError as error:
        raise MismatchError(str(error)) from error
