"""One rank of ``hpctrain.run``: ``python -m hpctrain.runtime.run_worker FOLDER``."""

import contextlib
import pickle
import sys
import time
import traceback
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from hpctrain.runtime import world
from hpctrain.runtime.run import CALL, FAILURE, RESULT, Failure


def main(folder: Path) -> None:
    """Call the function that lies in the folder and leave its result or its failure there."""
    world.init()
    rank = world.rank()
    try:
        fn, args, kwargs = pickle.loads((folder / CALL).read_bytes())  # noqa: S301 - ours
        result = cloudpickle.dumps(fn(*args, **kwargs))
    except BaseException as error:
        failure = cloudpickle.dumps(_describe(rank, error))
        _write(folder / FAILURE.format(rank=rank), failure)
        raise  # the hook of init ends the other ranks
    _write(folder / RESULT.format(rank=rank), result)


def _describe(rank: int, error: BaseException) -> Failure:
    exception = b""
    with contextlib.suppress(Exception):  # an exception may hold what cannot be pickled
        exception = cloudpickle.dumps(error)
    return Failure(
        rank=rank,
        when_s=time.time(),
        summary=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        exception=exception,
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: this rank may be killed any moment."""
    half = path.with_suffix(".half")
    half.write_bytes(content)
    half.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
