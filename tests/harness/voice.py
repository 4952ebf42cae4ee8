"""What a rank says past pytest's capture."""

import os
from typing import TextIO


class Voice:
    """Writes to the real stderr, each line tagged with the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.stream: TextIO = os.fdopen(os.dup(2), "w")

    def say(self, *parts: str) -> None:
        """Write at once and in one piece, so that the words of many ranks stay apart."""
        lines = "\n".join(part.rstrip("\n") for part in parts).splitlines()
        self.stream.write("".join(f"[rank {self.rank}] {line}\n" for line in lines))
        self.stream.flush()
