"""What each script of the tour does with a claim: all ranks check it, and rank 0 prints it."""

import hpctrain as hvd


def claim(text: str, *, holds: bool) -> None:
    """Print what is claimed; a claim that fails on any rank ends all with exit code 1."""
    holds_everywhere = all(hvd.allgather_object(bool(holds)))
    if hvd.rank() == 0:
        print(f"{'holds' if holds_everywhere else 'FAILS'}: {text}", flush=True)
    if not holds_everywhere:
        raise SystemExit(1)
