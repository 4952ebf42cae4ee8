"""Errors and warnings for users. A message states the rule, the value found and the remedy."""


class HpctrainError(Exception):
    """Base class of the errors that hpctrain raises for its users."""


class ConfigError(HpctrainError, ValueError):
    """A setting, a key of a configuration file or an argument is not valid."""


class LaunchError(HpctrainError):
    """The launcher, the MPI library and the MPI world are inconsistent."""


class TopologyError(HpctrainError):
    """Ranks and nodes do not form a valid topology."""


class CommError(HpctrainError):
    """A collective operation has failed."""


class NodeMemoryError(CommError):
    """Shared memory of the ranks of a node could not be allocated."""


class RankLostError(CommError):
    """This rank waited for a rank that died, exited, or left a ``with`` block by an error."""


class MismatchError(CommError):
    """The ranks disagree about the next operation; raised on every rank."""


class ReplicaError(MismatchError):
    """Replicas of a model differ; raised on every rank; names the tensor and the ranks."""


class HorovodInternalError(CommError, RuntimeError):
    """A named operation has failed on every rank; the ranks can continue.

    Horovod has an error class of the same name. ``elastic.run`` restores the last commit after
    this error.
    """


class OperationMismatchError(HorovodInternalError, MismatchError):
    """Ranks submitted incompatible operations under the same name."""


class DuplicateNameError(HorovodInternalError, ValueError):
    """An operation with the same name is already in flight on this rank."""


class NotFiniteError(HpctrainError):
    """A value is NaN or infinite; raised on every rank; the message names the affected rank."""


class DataError(HpctrainError):
    """A data set is missing, damaged or inconsistent with its manifest."""


class CorruptError(DataError):
    """Samples of a data set cannot be read, because their bytes or their file are damaged."""

    def __init__(self, message: str, start: int, stop: int) -> None:
        """Store the range ``[start, stop)`` of the damaged samples."""
        super().__init__(message, start, stop)
        self.start = start
        self.stop = stop

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(HpctrainError):
    """A checkpoint cannot be written or read."""


class HpctrainDeprecationWarning(DeprecationWarning):
    """A name or an argument still works, but will be removed; the message names a replacement.

    ``hpctrain guide versions`` describes how long a deprecated name works.
    """


class NotInitializedError(HpctrainError, ValueError):
    """A function that needs the world was called before ``hpctrain.init()``."""
