"""Finding of a part of ``gpu_check.py``: the part prints it as a line, which the driver reads."""

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
    """A verdict and its figures."""

    verdict: Literal["pass", "fail", "skip"]
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def tell(self) -> None:
        """Print it, on the first rank."""
        if os.environ.get("RANK", "0") == "0":
            self.write()

    def write(self) -> None:
        """Print it, on any rank."""
        sys.stdout.write(f"\n{MARK}{json.dumps(asdict(self))}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def errors_told() -> Iterator[None]:
    """Turn an error on any rank into a finding, and continue."""
    try:
        yield
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        said = f"rank {rank}: {type(error).__name__}: {error}"
        Finding("fail", said, {"traceback": traceback.format_exc()}).write()
        raise


def heard(output: str) -> list[Finding]:
    """Read the findings in an output."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return [Finding(**json.loads(line.removeprefix(MARK))) for line in lines]
