"""Refusals of files and memory, and damage, as errors that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core.atomic import refusal
from hpctrain.core.errors import CheckpointError, MismatchError


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Let what files and memory refuse in the block be a CheckpointError: "cannot ``what``"."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        told = refusal(error, "use another directory")
        raise CheckpointError(f"cannot {what}{named}: {told}") from error


@contextmanager
def of_save(step: int) -> Iterator[None]:
    """Name the step in a CheckpointError of the block, which may be raised by a later call."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the save of step {step} failed: {error}") from error


@contextmanager
def mismatches() -> Iterator[None]:
    """Raise a MismatchError of the block, which is one of all ranks, as a CheckpointError."""
    try:
        yield
    except MismatchError as error:
        raise CheckpointError(str(error)) from None


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error that a file of a checkpoint is not what was written."""
    return CheckpointError(
        f"checkpoint file {path} is damaged: {printable(what)}; use another checkpoint"
    )


def printable(text: str) -> str:
    """Return a text that may come from a stranger in one line, without escapes, not too long."""
    return "".join(char if char.isprintable() else "?" for char in text[:400])
