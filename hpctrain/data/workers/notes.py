"""Notes of a decode worker in memory that outlives it: its sample, and its stack."""

import contextlib
import faulthandler
import mmap
import os

import numpy as np

_NONE = -1
_MODULES = "\n\nExtension modules: "
"""What ``faulthandler`` writes behind the stacks."""


class Notes:
    """A page for the sample under way, and behind it what ``faulthandler`` writes at a signal."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Make the memory, or map that of the process from which a descriptor was inherited."""
        if descriptor is None:
            descriptor = os.memfd_create("hpctrain-notes", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._sample = np.frombuffer(mmap.mmap(descriptor, mmap.PAGESIZE), np.int64, 1)
        self.end_samples()

    @property
    def descriptor(self) -> int:
        """Of the memory, for a process that inherits it."""
        return self._file.fileno()

    @property
    def sample(self) -> int | None:
        """The sample under way; None between samples and for what takes a batch as a whole."""
        number = int(self._sample[0])
        return None if number == _NONE else number

    def begin_sample(self, index: int) -> None:
        """Note that the work on a sample begins."""
        self._sample[0] = index

    def end_samples(self) -> None:
        """Note that no sample is under way."""
        self._sample[0] = _NONE

    def catch_signals(self) -> None:
        """Let signals that end this process, SIGABRT too, write the stacks of its threads."""
        os.lseek(self.descriptor, 0, os.SEEK_END)
        faulthandler.enable(self.descriptor)

    def stack(self) -> str:
        """Return what a signal has made the worker write; empty if nothing has."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            size = os.fstat(self.descriptor).st_size - mmap.PAGESIZE
            text = os.pread(self.descriptor, size, mmap.PAGESIZE).decode(errors="replace")
            # The signal is named in a paragraph of its own, before the stacks.
            return text.partition(_MODULES)[0].partition("\n\n")[2].strip()
        return ""

    def close(self) -> None:
        """Forget what was written."""
        self._file.close()
