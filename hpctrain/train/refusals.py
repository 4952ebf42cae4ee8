"""Conversion of torch errors about data, model or loss into errors with a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb

import torch
from torch import Tensor

from hpctrain.core.errors import DataError, HpctrainError
from hpctrain.core.logs import logger
from hpctrain.core.user_error import described, layer_of, noted, user_lines
from hpctrain.train.run_config import RunConfig

_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


@contextmanager
def explain_errors(whose: str, *values: object) -> Iterator[None]:
    """Add the name of a user's function, and its arguments, to errors inside the block.

    An error raised in the code of torch becomes a ``DataError``; another error gets a note.

    Args:
        whose: description of the function, such as ``model.target = "..."``.
        values: arguments of the function.

    Raises:
        DataError: torch raised an error.
    """
    try:
        with noted(whose, *values):
            yield
    except _REFUSALS as error:
        is_other = isinstance(error, HpctrainError | torch.OutOfMemoryError)
        if is_other or "/torch/" not in extract_tb(error.__traceback__)[-1].filename:
            raise
        logger.info("the model or the loss refuses its input", exc_info=error)
        given, message = " and ".join(map(described, values)), f"{type(error).__name__}: {error}"
        remedy = _remedy(message, [each.dtype for each in values if isinstance(each, Tensor)])
        text = f"model, loss and data must fit together, but {whose} refuses {given}: {message}"
        layer = layer_of(error)
        where = [f"in {layer}"] * bool(layer) + user_lines(error)
        lines = [f"{text}{remedy}", *(f"  {line}" for line in where)]
        raise DataError("\n".join(lines)) from error


def _remedy(message: str, dtypes: list[torch.dtype]) -> str:
    """Return a remedy for an error about dtypes or shapes; empty for other errors.

    ``dtypes`` are the dtypes of the model input, or the dtypes of model output and labels.
    """
    if "Double" in message and "Float" in message and dtypes:
        is_loss = len(dtypes) > 1
        goal = "f4" if (dtypes[0] == torch.float32) is is_loss else "f8"
    elif "Long" in message:
        goal = "i8"
    else:
        shapes = "shape" in message or "size" in message
        return "; change the model, or the shape of the samples in data.transform" * shapes
    return (
        f"; pack the data again with --field NAME=WHAT:{goal}, which stores that type of numbers, "
        f"or convert the field in data.transform"
    )


def targets(config: RunConfig) -> tuple[str, str]:
    """Return ``model.target = "..."`` and ``loss.target = "..."``, for error messages."""
    return f'model.target = "{config.model.target}"', f'loss.target = "{config.loss.target}"'


def step_name(config: RunConfig) -> str:
    """Return the description of a training step, with model and loss, for error messages."""
    return f"the step of {' and '.join(targets(config))}"
