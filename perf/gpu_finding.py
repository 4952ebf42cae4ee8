"""Finding of a part of ``gpu_check.py``, which the part prints as a line for that program."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MARK = "gpu-check: "
"""Stands before the JSON."""


@dataclass
class Finding:
    """Verdict of a part, with its reason and figures."""

    verdict: Literal["pass", "fail", "skip"]
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def write_on_rank_0(self) -> None:
        """Print the finding on rank 0."""
        if os.environ.get("RANK", "0") == "0":
            self.write()

    def write(self) -> None:
        """Print the finding on this rank."""
        sys.stdout.write(f"\n{MARK}{json.dumps(asdict(self))}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Print an error inside the block as a finding of this rank, and raise it again."""
    try:
        yield
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        text = f"rank {rank}: {type(error).__name__}: {error}"
        Finding("fail", text, {"traceback": traceback.format_exc()}).write()
        raise


def findings_in(output: str) -> list[Finding]:
    """Return the findings in the output of a launch."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return [Finding(**json.loads(line.removeprefix(MARK))) for line in lines]
