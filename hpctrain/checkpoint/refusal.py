"""Errors of files, memory and damage as CheckpointError with a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core.atomic import refusal
from hpctrain.core.errors import CheckpointError, MismatchError


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise errors of files and memory in the block as CheckpointError: "cannot ``what``"."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        reason = refusal(error, "use another directory")
        raise CheckpointError(f"cannot {what}{named}: {reason}") from error


@contextmanager
def of_save(step: int) -> Iterator[None]:
    """Name the step in a CheckpointError of the block, which may be raised by a later call."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the save of step {step} failed: {error}") from error


@contextmanager
def mismatches() -> Iterator[None]:
    """Raise a MismatchError of the block, which all ranks raise, as a CheckpointError."""
    try:
        yield
    except MismatchError as error:
        raise CheckpointError(str(error)) from None


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a file of a checkpoint that has changed."""
    return CheckpointError(
        f"checkpoint file {path} is damaged: {printable(what)}; use another checkpoint"
    )


def printable(text: str) -> str:
    """Return an untrusted text in one short line without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:400])
