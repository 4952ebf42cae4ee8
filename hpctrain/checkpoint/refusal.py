"""Conversion of errors of files, memory and damage to CheckpointError."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core.atomic import refusal
from hpctrain.core.errors import CheckpointError, MismatchError


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert errors of files and memory in the block to CheckpointError "cannot ``what``".

    ``what`` begins with a verb. If the verb is "read", the message suggests another checkpoint,
    otherwise another directory.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        other = "checkpoint" if what.startswith("read") else "directory"
        reason = refusal(error, f"use another {other}")
        raise CheckpointError(f"cannot {what}{named}: {reason}") from error


@contextmanager
def of_save(step: int) -> Iterator[None]:
    """Add the step to a CheckpointError of the block, because a later call may raise it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the save of step {step} failed: {error}") from error


@contextmanager
def mismatches() -> Iterator[None]:
    """Convert a MismatchError of the block, which all ranks raise, to a CheckpointError."""
    try:
        yield
    except MismatchError as error:
        raise CheckpointError(str(error)) from None


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the CheckpointError for a damaged file of a checkpoint."""
    return CheckpointError(
        f"checkpoint file {path} is damaged: {printable(what)}; use another checkpoint"
    )


def printable(text: str) -> str:
    """Return the first 400 characters of an untrusted text, with ``?`` for control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:400])
