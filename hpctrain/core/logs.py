"""The logger ``hpctrain``: tags lines by rank, writes a file per host, merges equal warnings.

This module does not use MPI: ``runtime/world`` passes the rank and gathers held warnings.
"""

import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import TextIOWrapper
from pathlib import Path

from hpctrain.core import config
from hpctrain.core.units import format_ranks

logger = logging.getLogger("hpctrain")


@cache
def warn_once(text: str) -> None:
    """Log a warning unless this process has already logged the same text."""
    logger.warning("%s", text)


_PLAIN = "hpctrain: %(message)s"
_IN_FILE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OF_ALL = {"of_all_ranks": True}
MAX_TEXTS = 16  # maximum number of different warnings that are printed for all ranks together


def setup(rank: int, size: int, log_dir: Path | None = None, *, level: str = "warning") -> None:
    """Configure the logger of this process; a second call replaces the first.

    Each line is tagged with the rank. Records of ``level`` and above are printed to stderr, unless
    the program has handlers on the root logger. With ``log_dir`` the rank also appends records
    to the file that ``file_in`` returns; the first record creates the file.
    """
    threshold = logging.getLevelName(level.upper())
    for old in [h for h in logger.handlers if isinstance(h, (_Console, _RankFile))]:
        logger.removeHandler(old)
        old.close()
    if logger.level == logging.NOTSET:
        logger.setLevel(min(logging.INFO, threshold))
    console = _Console()
    console.setLevel(threshold)
    console.setFormatter(_Tagged(_PLAIN, rank=rank if size > 1 else None))
    logger.addHandler(console)
    if log_dir is not None:
        file = _RankFile(file_in(log_dir, rank), delay=True)
        file.setFormatter(_Tagged(_IN_FILE, rank=rank if size > 1 else None))
        logger.addHandler(file)


def file_in(folder: Path, rank: int) -> Path:
    """Return the log file of a rank: one file per host, to which all ranks of the host append.

    With ``HPCTRAIN_LOG_PER_RANK`` each rank has its own file.
    """
    name = f"rank-{rank}" if config.setting("log_per_rank") else platform.node()
    return folder / f"{name}.log"


def opened(file: Path) -> TextIOWrapper:
    """Open a log file to append text; create its folder if it is missing.

    Up to 64 KiB are written at once, so that lines of different ranks do not mix.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.open("a", buffering=1 << 16, encoding="utf-8")


@contextmanager
def held() -> Iterator[list[str]]:
    """Collect the warnings of this process in the yielded list instead of logging them.

    Other records are logged. If the block raises, the warnings are logged too, because they may
    explain the error.
    """
    holder = _Holder(list(logger.handlers), propagate=logger.propagate)
    logger.handlers, logger.propagate = [holder], False
    try:
        yield holder.messages
    except BaseException:
        holder.log_all()
        raise
    finally:
        logger.handlers, logger.propagate = holder.handlers, holder.propagate


def merge(messages_by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Merge the warnings of all ranks, so that each text occurs once, with its ranks.

    Returns:
        Texts in the order of their first ranks: ``text [ranks 0-3, 4 of 6]`` for several ranks,
        ``text [rank 2]`` for one rank, and the text alone in a world of one rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, messages in enumerate(messages_by_rank):
        for text in dict.fromkeys(messages):
            ranks_of.setdefault(text, []).append(rank)
    size = len(messages_by_rank)
    texts = [f"{text}{_whose(ranks, size)}" for text, ranks in ranks_of.items()]
    if rest := {rank for ranks in [*ranks_of.values()][MAX_TEXTS:] for rank in ranks}:
        more = f"{len(texts) - MAX_TEXTS} other warnings, which are not shown"
        texts[MAX_TEXTS:] = [f"{more}{_whose(sorted(rest), size)}"]
    return texts


def warn_merged(messages_by_rank: Sequence[Sequence[str]]) -> None:
    """Log the merged warnings without a rank tag. Only one rank calls this function."""
    for text in merge(messages_by_rank):
        logger.warning("%s", text, extra=_OF_ALL)


def _whose(ranks: list[int], size: int) -> str:
    if size == 1:
        return ""
    if len(ranks) == size:
        return f" [all {size} ranks]"
    count = f", {len(ranks)} of {size}" if len(ranks) > 1 else ""
    return f" [{format_ranks(ranks)}{count}]"


class _Tagged(logging.Formatter):
    """Formatter that adds ``[rank N]`` to every line, because ranks share a terminal."""

    def __init__(self, fmt: str, *, rank: int | None) -> None:
        super().__init__(fmt)
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if self._rank is None or getattr(record, "of_all_ranks", False):
            return text
        return "\n".join(f"[rank {self._rank}] {line}" for line in text.splitlines())


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that prints to stderr, unless the program has handlers on the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


class _RankFile(logging.FileHandler):
    """Handler that appends to the log file, which the first record creates."""

    def _open(self) -> TextIOWrapper:
        return opened(Path(self.baseFilename))


class _Holder(logging.Handler):
    """Handler that collects warnings and passes all other records to ``handlers``."""

    def __init__(self, handlers: list[logging.Handler], *, propagate: bool) -> None:
        super().__init__()
        self.handlers = handlers
        self.propagate = propagate
        self.messages: list[str] = []
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.messages.append(record.getMessage())
            self._records.append(record)
        else:
            self._forward(record)

    def log_all(self) -> None:
        """Log the collected warnings."""
        for record in self._records:
            self._forward(record)

    def _forward(self, record: logging.LogRecord) -> None:
        for handler in self.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
        if self.propagate and logger.parent is not None:
            logger.parent.callHandlers(record)
