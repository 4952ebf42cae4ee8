"""Last record of a run that fails, with the reason."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError, MismatchError, NotFiniteError, RankLostError
from hpctrain.core.records import Records
from hpctrain.launch.lease import Holder, Lease
from hpctrain.runtime import world
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.run_status import last_record

COMMON = (MismatchError, NotFiniteError)
"""Errors that all ranks raise together; records of other errors name the rank."""


class FailureRecord:
    """Appends a record ``failed`` if an exception ends the run. The constructor is collective.

    If all ranks fail together, rank 0 writes the record; otherwise the failing rank writes it,
    because rank 0 does not receive the reason. The loss of a rank is not recorded, because
    ``hpctrain status`` detects it from the lease, which the lost job no longer renews.

    Args:
        directory: directory of the run.
        comm: all ranks.
        lease: lock of the directory, on rank 0; None on other ranks.
        step: returns the number of finished steps.
    """

    def __init__(
        self,
        directory: RunDirectory,
        comm: Communicator,
        lease: Lease | None,
        step: Callable[[], int],
    ) -> None:
        self._directory, self._comm, self._step = directory, comm, step
        token = lease.token if lease is not None else ""
        self._token, self._before = comm.broadcast_object((token, self._state()))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context that records exceptions inside the block. Local."""
        try:
            yield
        except RankLostError:
            raise
        except COMMON as error:
            if self._comm.rank == 0:
                self._write(str(error))
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not error.code:
                raise
            message = str(error) or "no message"
            text = (
                message if isinstance(error, ConfigError) else f"{type(error).__name__}: {message}"
            )
            hooks = world.current().attachments.hooks
            if hooks is None:
                self._write(text)
            else:  # ranks write one after another, so the same error is recorded only once
                hooks.last_words.append(lambda: self._write(f"rank {self._comm.rank}: {text}"))
            raise

    def _state(self) -> tuple[int, int] | None:
        """Return inode and size of the file of records; each new record changes one of them."""
        with suppress(OSError):
            found = self._directory.metrics.stat()
            return found.st_ino, found.st_size
        return None

    def _write(self, text: str) -> None:
        holder = Holder.read(self._directory.path)
        if holder is not None and holder.token != self._token:  # taken by another job
            return
        path = self._directory.metrics
        with suppress(OSError, ValueError):
            is_new = self._state() != self._before
            if is_new and last_record(path).get("event") == "failed":
                return
            with Records(path) as records:
                reason = text.partition("\n")[0]
                records.append({"event": "failed", "step": self._step(), "reason": reason})
                records.sync()
