"""Timelines that begin and end while a program runs."""

from hpctrain.runtime import world


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002
    """Record what named operations do from now on, in a file that Perfetto and Chrome open.

    Not collective. A timeline that is being recorded in another file ends.

    Args:
        file_path: the file of rank 0, the only one that records; with ``{rank}`` in it, which
            becomes the number of each, every rank that calls this writes a file.
        mark_cycles: whether to mark where each round of the controller begins.

    Raises:
        NotInitializedError: ``init`` was not called; a ``ValueError``.
    """
    world.current().timelines.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline: its file is complete. Not collective; harmless without one.

    Raises:
        NotInitializedError: ``init`` was not called; a ``ValueError``.
    """
    world.current().timelines.stop()
