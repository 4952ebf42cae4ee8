"""What is typed, for a program that is kept away from the terminal."""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import IO

TRY_AGAIN_S = 0.5
"""Between two tries to read while another program has the terminal."""


def hand_on_input(sink: IO[bytes]) -> None:
    """Write to ``sink`` all that is typed on stdin, a terminal, from now on; closes at its end.

    A thread does it and never ends before that: a process does not wait for it.
    """
    threading.Thread(target=_hand_on, args=(sink,), daemon=True, name="what is typed").start()


def _hand_on(sink: IO[bytes]) -> None:
    source = sys.__stdin__
    assert source is not None
    # To read a terminal from the background stops a process, unless it blocks the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
    with contextlib.suppress(OSError), sink:  # a pipe that nobody reads any more
        while True:
            try:
                typed = os.read(source.fileno(), 4096)
            except OSError:  # in the background, or the terminal is gone
                time.sleep(TRY_AGAIN_S)
                continue
            if not typed:
                return
            sink.write(typed)
            sink.flush()
