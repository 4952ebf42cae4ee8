"""Traces of selected steps, for chrome://tracing and Perfetto."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpctrain.core.atomic import make_folder, publishing
from hpctrain.core.logs import logger
from hpctrain.core.python_compat import Self
from hpctrain.train.run_config import LogConfig


class Profiler:
    """Traces the steps ``log.profile`` on the ranks ``log.profile_ranks``.

    If a run resumes within these steps, a new trace contains the remaining steps.

    Args:
        config: selects steps and ranks.
        folder: folder of the traces.
        rank: rank of this process.
    """

    def __init__(self, config: LogConfig, folder: Path, rank: int) -> None:
        is_chosen = bool(config.profile) and rank in config.profile_ranks
        self._steps = range(config.profile[0], config.profile[1] + 1) if is_chosen else range(0)
        self._folder, self._rank = folder, rank
        self._trace: profile | None = None
        self._first = 0

    def before(self, step: int) -> None:
        """Start the trace before the first traced step, and write it after the last. Local.

        The trace includes work between two steps, such as a test.
        """
        if step in self._steps and self._trace is None:
            kinds = [ProfilerActivity.CPU]
            kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._trace, self._first = profile(activities=kinds), step
            self._trace.start()
        elif self._trace is not None and step not in self._steps:
            self._write(step - 1)
        self._last = step

    def _write(self, last: int) -> None:
        """Write the trace; log a warning if the file cannot be written."""
        assert self._trace is not None
        trace, self._trace = self._trace, None
        trace.stop()
        path = self._folder / f"rank-{self._rank}-steps-{self._first}-{last}.json"
        try:
            make_folder(self._folder)
            with publishing(path) as part:
                trace.export_chrome_trace(str(part))
        except (OSError, RuntimeError) as error:
            logger.warning(f"the trace {path} cannot be written: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._trace is not None:
            self._write(self._last)
