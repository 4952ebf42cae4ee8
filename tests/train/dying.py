"""``hpctrain`` with a rank that kills itself when it enters a function.

    dying.py RANK FILE:FUNCTION NTH ARGS...

``FILE`` is the end of the path of the source file; the rank dies at the NTH call.
"""

import os
import signal
import sys

from hpctrain.cli.main import main


def die_in(place, nth):
    """Kill this process at the nth call of a function."""
    file, name = place.split(":")

    def watch(frame, event, _):
        nonlocal nth
        code = frame.f_code
        if event == "call" and code.co_name == name and code.co_filename.endswith(file):
            nth -= 1
            if not nth:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


if __name__ == "__main__":
    rank, place, nth, *sys.argv[1:] = sys.argv[1:]
    if os.environ["OMPI_COMM_WORLD_RANK"] == rank:
        die_in(place, int(nth))
    main()
