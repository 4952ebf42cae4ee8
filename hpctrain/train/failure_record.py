"""The record of a run that fails: its last one, with the reason."""

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
"""Errors that all ranks raise together; the record of any other names its rank."""


class FailureRecord:
    """Appends ``failed`` to the records of a run that an exception ends.

    Rank 0 writes if all ranks fail together, else the rank that fails: rank 0 does not learn why
    another rank ends it. The loss of a rank is left to ``hpctrain status``, which judges by the
    lease: the rank was killed.
    """

    def __init__(
        self,
        directory: RunDirectory,
        comm: Communicator,
        lease: Lease | None,
        step: Callable[[], int],
    ) -> None:
        """Take what is needed. Collective.

        Args:
            directory: of the run.
            comm: ranks of the run.
            lease: on the directory, on rank 0.
            step: returns the number of finished steps.
        """
        self._directory, self._comm, self._step = directory, comm, step
        token = lease.token if lease is not None else ""
        self._token, self._before = comm.broadcast_object((token, self._state()))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Record what is raised inside; not collective."""
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
            said = str(error) or "no message"
            text = said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"
            hooks = world.current().attachments.hooks
            if hooks is None:
                self._write(text)
            else:  # they are called in rank order, so that what ends all ranks is recorded once
                hooks.last_words.append(lambda: self._write(f"rank {self._comm.rank}: {text}"))
            raise

    def _state(self) -> tuple[int, int] | None:
        """Return what changes with each record."""
        with suppress(OSError):
            found = self._directory.metrics.stat()
            return found.st_ino, found.st_size
        return None

    def _write(self, text: str) -> None:
        holder = Holder.read(self._directory.path)
        if holder is not None and holder.token != self._token:  # another job has the directory
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
