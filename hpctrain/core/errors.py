"""Every error a user can meet: it states the rule, the values found and the way out."""


class HpctrainError(Exception):
    """Base of all errors raised for users of hpctrain."""


class ConfigError(HpctrainError, ValueError):
    """A setting, a key of a configuration file or an argument is not valid."""


class LaunchError(HpctrainError):
    """The launcher, the MPI library and the world they made do not fit together."""


class TopologyError(HpctrainError):
    """Ranks and nodes do not form a valid topology."""


class CommError(HpctrainError):
    """A collective operation cannot be carried out as asked."""


class NodeMemoryError(CommError):
    """Memory that the ranks of a node share could not be had."""


class RankLostError(CommError):
    """Another rank died, or left the program or a block, while this rank waited for it."""


class MismatchError(CommError):
    """The ranks disagree about what to do: every one of them raises this."""


class ReplicaError(MismatchError):
    """The replicas of a model differ: every rank raises this, and it names what and where."""


class HorovodInternalError(CommError, RuntimeError):
    """A named operation failed, on every rank alike; the ranks are there and can go on.

    The name is Horovod's: ``elastic.run`` returns to the last commit on it.
    """


class OperationMismatchError(HorovodInternalError, MismatchError):
    """The ranks gave the same name to operations that do not fit together."""


class DuplicateNameError(HorovodInternalError, ValueError):
    """An operation of this name is under way on this rank already."""


class NotFiniteError(HpctrainError):
    """A value became NaN or infinite: every rank raises this, and it names the rank."""


class DataError(HpctrainError):
    """A data set is missing, damaged or not what its manifest says."""


class CorruptError(DataError):
    """Samples of a data set cannot be had: their bytes are damaged, or their file is."""

    def __init__(self, message: str, start: int, stop: int) -> None:
        """Tell what happened to the samples ``[start, stop)`` of the data set."""
        super().__init__(message, start, stop)
        self.start = start
        self.stop = stop

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(HpctrainError):
    """A checkpoint cannot be written or read."""


class NotInitializedError(HpctrainError, ValueError):
    """A function that needs the world was called before ``hpctrain.init()``."""
