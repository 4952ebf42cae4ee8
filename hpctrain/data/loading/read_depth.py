"""Read depth: steps that are read together, threads, and the lead."""

from typing import NamedTuple

from hpctrain.cluster.cores import affinity
from hpctrain.core.units import MIB

_PART_BYTES = 8 * MIB
_PART_BYTES_OF_THREAD = 16 * MIB
_MOST_TOGETHER = 128


class ReadDepth(NamedTuple):
    """What a rank reads at once, and what at the same time."""

    together: int
    """Steps that one read gathers: a read costs as much as many small samples."""
    threads: int
    depth: int
    """Reads ahead of the consumer, 0 for none."""

    @classmethod
    def of(
        cls,
        batch_bytes: float,
        *,
        threads: int,
        prefetch: int,
        workers: int = 0,
        is_copy: bool = False,
        has_transform: bool = False,
    ) -> "ReadDepth":
        """Choose.

        Args:
            batch_bytes: of this rank's part of a step.
            threads: that may read.
            prefetch: batches that are wanted ahead.
            workers: processes that read instead, 0 for none.
            is_copy: whether reading is no more than a copy from memory to memory.
            has_transform: whether each batch has work of its own, worth a thread.
        """
        if workers:
            # A thread waits for a worker; each worker has its next batch waiting.
            depth = max(prefetch, 2 * workers)
            return cls(1, depth, depth)
        # What a thread reads is handed over, which costs as well.
        part_bytes = _PART_BYTES if is_copy else _PART_BYTES_OF_THREAD
        most = 1 if has_transform else _MOST_TOGETHER
        together = max(1, min(most, int(part_bytes / max(1.0, batch_bytes))))
        if is_copy:
            # A thread costs more than the copy that it would hide, and more buffers than one
            # fall out of the caches.
            return cls(together, threads, 0)
        depth = prefetch if together == 1 else max(threads, -(-prefetch // together))
        return cls(together, threads, depth)

    def of_copies(self) -> "ReadDepth":
        """Return the same where others bring all into memory, and threads have but to copy.

        More of them than cores only wait for each other.
        """
        return self._replace(threads=min(self.threads, len(affinity())))
