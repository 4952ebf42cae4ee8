"""An error of one rank becomes an error of all."""

from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.comm.agreement import raise_if_any
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import HpctrainError, MismatchError, RankLostError


@contextmanager
def agreed(comm: Communicator) -> Iterator[None]:
    """Leave the block only if no rank raised in it.

    Collective at its end; what is collective inside must raise on all ranks or on none.

    Raises:
        MismatchError: what the ranks raised, once if all said the same, else with the ranks.
            Errors that are not ours keep their trace and end the program as any other.
    """
    refusal: HpctrainError | None = None
    try:
        yield
    except (MismatchError, RankLostError):
        raise  # agreed already, or there is nobody to agree with
    except HpctrainError as error:
        refusal = error
    texts = comm.allgather_object(None if refusal is None else str(refusal))
    if refusal is not None and len(set(texts)) == 1:
        raise MismatchError(texts[0]) from refusal
    raise_if_any(texts)
